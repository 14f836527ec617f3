"""The numerics gate inside a vLLM worker: which mHC operators its models hold, checked when they are loaded.

`vllm.v1.worker.gpu_worker.Worker.load_model` is wrapped, by which CUDA, ROCm and CPU workers all load target
and draft. What the gate saw becomes the section `numerics` of this process's report. With `mhc.gate: refuse`
a wrong operator stops the process, and `dspark-serve` ends with exit code 4; with `warn` it is a line in the
log.

A model without mHC operators costs a walk over its modules, and its section says `not applicable`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, not_applicable, refused
from dspark_deploy.plugin.when_loaded import when_loaded

if TYPE_CHECKING:
    from dspark_deploy.kernels.gate import GateReport
    from dspark_deploy.kernels.references import Geometry

WORKER = "vllm.v1.worker.gpu_worker"
LAYERS = "vllm.model_executor.layers.mhc"
SECTION = "numerics"
# A decoder layer's own flag for folding the norm that follows: V4's, V4.1's.
NORM_FLAGS = ("fuse_mhc_rmsnorm", "fuse_seam_norm")

AddSection = Callable[[str, Callable[[], Any]], None]
ApplyLate = Callable[[list[Patch]], None]
log = logging.getLogger("dspark_deploy.gate")


class NumericsGateError(RuntimeError):
    """An mHC operator of this engine is wrong, and the profile refuses to serve with it."""


def hook(policy: str, apply_late: ApplyLate, add_section: AddSection, write: Callable[[], None]) -> Patch:
    """The patch of the general phase: the gate comes with the worker's module, which only workers load."""

    def install() -> str:
        when_loaded(WORKER, lambda module: apply_late([patch(module, policy, add_section, write)]))
        return "a worker's models will be checked when it has loaded them"

    verdict = not_applicable("mhc.gate is off") if policy == "off" else READY
    return Patch("numerics-watch", "sys.meta_path", "the gate reaches workers only", lambda: verdict, install)


def patch(module: ModuleType, policy: str, add_section: AddSection, write: Callable[[], None]) -> Patch:
    """The patch of `vllm.v1.worker.gpu_worker`; `policy` is the profile's `mhc.gate`."""
    return Patch(
        "numerics-gate",
        f"{WORKER}.Worker.load_model",
        "every mHC operator is checked against fp64 before the engine is ready",
        functools.partial(_examine, module),
        functools.partial(_install, module, policy, add_section, write),
        required=policy == "refuse",
    )


def _examine(module: ModuleType) -> Verdict:
    if not callable(getattr(getattr(module, "Worker", None), "load_model", None)):
        return refused(f"{WORKER} has no Worker.load_model, after which models can be checked")
    return READY


def _install(module: Any, policy: str, add_section: AddSection, write: Callable[[], None]) -> str:
    original = module.Worker.load_model

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        report = check_models(loaded_models(self.model_runner), self.model_runner.device)
        # Alike in the reports of all workers but for this, by which a device with a fault is found.
        worker = {"pid": os.getpid(), "rank": getattr(self, "rank", None)}
        document = {"workers": local_workers(self.vllm_config.parallel_config), **worker, **report.as_json()}
        add_section(SECTION, lambda: document)
        write()
        judge(report, policy)
        return result

    module.Worker.load_model = load_model
    return "load_model is followed by the gate"


def judge(report: GateReport, policy: str) -> None:
    """Raise NumericsGateError for wrong numbers under `refuse`, or log them under `warn`."""
    if report.state != "wrong":
        return
    message = f"numerics gate: {report.message()}"
    if policy == "refuse":
        raise NumericsGateError(
            f"{message}\nTake another mhc.provider, or set mhc.gate: warn to serve anyway"
        )
    log.error(message)


def check_models(models: list[Any], device: Any) -> GateReport:
    """The gate over the mHC operators of `models`, target and draft, on `device`."""
    import torch

    from dspark_deploy.kernels.gate import check_operators

    known: dict[str, tuple[Any, Geometry]] = {}
    unknown: set[str] = set()
    for place, operator, geometry in mhc_operators(models):
        if geometry is None:
            unknown.add(type(operator).__name__)
        else:
            known[place] = (operator, geometry)
    report = check_operators(known, torch.device(device))
    report.unchecked += sorted(unknown)
    if not known and any(hasattr(module, "hc_mult") for model in models for module in model.modules()):
        report.reason = "its mHC ops are plain functions, which the gate can't reach"
    return report


def local_workers(parallel_config: Any) -> int:
    """How many workers of this machine check their own device."""
    world = getattr(parallel_config, "local_world_size", parallel_config.world_size)
    return int(world) * int(getattr(parallel_config, "data_parallel_size_local", 1))


def loaded_models(runner: Any) -> list[Any]:
    """Target and, behind it, draft of a runner, V1's or V2's, that has loaded its models."""
    holders = [getattr(runner, name, None) for name in ("speculator", "drafter")]
    drafts = [getattr(holder, "model", None) for holder in holders]
    return [model for model in (runner.model, *drafts) if hasattr(model, "named_modules")]


def mhc_operators(models: list[Any]) -> Iterator[tuple[str, Any, Geometry | None]]:
    """Each mHC operator below `models`: its place, `target layers.0.mhc_pre`, itself, its layer's geometry.

    An operator outside the decoder layers, such as the head, takes the geometry of the model's first layer,
    or None where there is no such layer.
    """
    for role, model in zip(("target", "draft"), models, strict=False):
        fallback: Any = None
        outside = []
        for path, owner in model.named_modules():
            for name, operator in owner.named_children():
                if type(operator).__module__ != LAYERS:
                    continue
                place = f"{role} {path}.{name}" if path else f"{role} {name}"
                if hasattr(owner, "hc_mult") and hasattr(owner, "hidden_size"):
                    if fallback is None and hasattr(owner, "hc_sinkhorn_iters"):
                        fallback = owner
                    yield place, operator, geometry_of(owner, fallback)
                else:
                    outside.append((place, operator))
        for place, operator in outside:
            yield place, operator, None if fallback is None else geometry_of(fallback, fallback)


def geometry_of(owner: Any, layer: Any) -> Geometry:
    """What a module says of itself; constants that it doesn't have are the layer's, or DeepSeek-V4's own."""
    from dspark_deploy.kernels.mhc_pre import Constants
    from dspark_deploy.kernels.references import Geometry

    def constant(name: str, default: float) -> float:
        return float(getattr(owner, name, getattr(layer, name, default)))

    eps, rms_eps = constant("hc_eps", 1e-6), constant("rms_norm_eps", 1e-6)
    constants = Constants(
        rms_eps=rms_eps,
        pre_eps=eps,
        sinkhorn_eps=eps,
        post_mult=constant("hc_post_alpha", 2.0),
        sinkhorn_repeat=int(constant("hc_sinkhorn_iters", 20)),
        norm_eps=rms_eps,
    )
    fused = any(bool(getattr(layer, name, False)) for name in NORM_FLAGS)
    return Geometry(int(owner.hidden_size), int(owner.hc_mult), constants, fused)
