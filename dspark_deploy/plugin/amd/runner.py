"""Where a worker's life changes phase: models loaded, graphs captured, ready.

    GPUModelRunner.load_model           target and draft are loaded in it; the warm-up follows
    GPUModelRunner.capture_model        graphs are captured in it, those of memory profiling too
    Worker.compile_or_warm_up_model     readiness follows it

Each is wrapped once, outside every step. Not covered: vLLM's V1 runner, which has no DSpark.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.amd.compiles import Compiles, Phase
from dspark_deploy.plugin.registry import READY, Patch, Verdict, refused

RUNNER, WORKER = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_worker"

# Each method with a name that its code uses, where one shows that it does what it is wrapped for.
RUNNER_METHODS = {"load_model": "speculator", "capture_model": ""}


def runner_patch(module: ModuleType, compiles: Compiles, warm: Callable[[Any], None]) -> Patch:
    """The patch of vLLM's V2 model runner; `warm(runner)` is called when target and draft are loaded."""
    return Patch(
        "mhc-warm-up",
        f"{RUNNER}.GPUModelRunner.load_model/capture_model",
        "every mHC kernel is compiled before capture, the draft's too",
        functools.partial(_examine, module, "GPUModelRunner", RUNNER_METHODS),
        functools.partial(_install_runner, module, compiles, warm),
    )


def worker_patch(module: ModuleType, compiles: Compiles, ready: Callable[[], None]) -> Patch:
    """The patch of vLLM's GPU worker; `ready()` is called when it is about to serve."""
    return Patch(
        "jit-phases",
        f"{WORKER}.Worker.compile_or_warm_up_model",
        "compiles after readiness are told from those before it",
        functools.partial(_examine, module, "Worker", {"compile_or_warm_up_model": "kernel_warmup"}),
        functools.partial(_install_worker, module, compiles, ready),
    )


def _examine(module: ModuleType, class_name: str, methods: dict[str, str]) -> Verdict:
    """Each method is there, and its code uses the name that shows it does what it is wrapped for."""
    owner = getattr(module, class_name, None)
    for method, used in methods.items():
        if not callable(getattr(owner, method, None)):
            return refused(f"{module.__name__}.{class_name} has no {method}")
        if used and used not in _names(owner, method):
            return refused(f"{class_name}.{method} does not use {used}, so it does something else here")
    return READY


def _names(owner: Any, method: str) -> set[str]:
    """Names that a method's code uses, and those of the methods of its class that it uses."""
    names = set(inspect.unwrap(getattr(owner, method)).__code__.co_names)
    for name in list(names):
        inner = inspect.unwrap(getattr(owner, name, None) or owner)
        names |= set(getattr(getattr(inner, "__code__", None), "co_names", ()))
    return names


def _install_runner(module: Any, compiles: Compiles, warm: Callable[[Any], None]) -> str:
    runner = module.GPUModelRunner
    load, capture = runner.load_model, runner.capture_model

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        if compiles.phase is Phase.LOAD:  # not again when weights are reloaded
            compiles.enter(Phase.WARMUP)
            warm(self)
        return result

    @functools.wraps(capture)
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = compiles.phase
        compiles.enter(Phase.CAPTURE)
        try:
            return capture(self, *args, **kwargs)
        finally:
            compiles.enter(before)

    runner.load_model, runner.capture_model = load_model, capture_model
    return "load_model is followed by the warm-up; capture_model is a phase"


def _install_worker(module: Any, compiles: Compiles, ready: Callable[[], None]) -> str:
    original = module.Worker.compile_or_warm_up_model

    @functools.wraps(original)
    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        ready()
        compiles.enter(Phase.SERVING)
        return result

    module.Worker.compile_or_warm_up_model = compile_or_warm_up_model
    return "what is compiled after it counts as serving"


def loaded_models(runner: Any) -> dict[str, Any]:
    """Target and draft of a runner whose load_model has returned."""
    models = {"target": runner.model}
    draft = getattr(getattr(runner, "speculator", None), "model", None)
    if draft is not None:
        models["draft"] = draft
    return models


def limits(runner: Any) -> tuple[int, list[int]]:
    """The largest token count of a step, and the token counts of captured graphs."""
    config = runner.vllm_config
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    return int(config.scheduler_config.max_num_batched_tokens), [int(size) for size in sizes]
