"""Which module's loading brings which patch on ROCm.

vLLM loads its mHC modules late, some of them only for the model it serves. So the general hook installs
nothing but a watch for their names; each patch is examined and installed when its module has been loaded, and
a process that never loads one, as the API server, pays for none. When a worker is ready, patches whose module
it never loaded are reported as `not applicable`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.amd.compiles import Compiles, process_compiles
from dspark_deploy.plugin.registry import READY, Patch, not_applicable
from dspark_deploy.plugin.settings import Settings
from dspark_deploy.plugin.when_loaded import still_waiting, when_loaded

logger = logging.getLogger("vllm.dspark_deploy.warmup")
Apply = Callable[[list[Patch]], None]
AddSection = Callable[[str, Callable[[], Any]], None]
DRAFTS = ("vllm.models.deepseek_v41.amd.dspark", "vllm.models.deepseek_v4.amd.dspark")


def hook(settings: Settings, apply_late: Apply, add_section: AddSection, write: Callable[[], None]) -> Patch:
    """The patch of the general phase, which brings the others, each with its module."""
    return Patch(
        "amd-modules",
        "sys.meta_path",
        "mHC patches are examined when their modules are loaded",
        lambda: READY,
        functools.partial(_install, settings, apply_late, add_section, write),
    )


def makers(
    settings: Settings, compiles: Compiles, warm: Callable[[Any], None], ready: Callable[[], None]
) -> dict[str, Callable[[ModuleType], Patch]]:
    """A function from loaded module to patch, by the module's name."""
    from dspark_deploy.plugin import wave64
    from dspark_deploy.plugin.amd import capture_guard, fused_post, provider, runner

    guard = functools.partial(capture_guard.patch, compiles=compiles)
    return {
        provider.LAYERS: functools.partial(provider.patch, provider=settings.mhc_provider),
        provider.TRITON_KERNELS: functools.partial(provider.collapse_patch, provider=settings.mhc_provider),
        wave64.KERNELS: functools.partial(
            wave64.patch, policy=settings.mhc_gate, provider=settings.mhc_provider
        ),
        **dict.fromkeys(DRAFTS, fused_post.patch),
        **dict.fromkeys((capture_guard.TILELANG, capture_guard.TRITON, capture_guard.AITER), guard),
        runner.RUNNER: functools.partial(runner.runner_patch, compiles=compiles, warm=warm),
        runner.WORKER: functools.partial(runner.worker_patch, compiles=compiles, ready=ready),
    }


def _install(
    settings: Settings, apply_late: Apply, add_section: AddSection, write: Callable[[], None]
) -> str:
    compiles = process_compiles
    compiles.guard = settings.jit_guard
    compiles.changed = write
    add_section("compiles", compiles.as_json)

    def warm(runner: Any) -> None:
        add_section("mhc", warm_runner(runner, compiles).as_json)
        write()

    def ready() -> None:
        apply_late([_never_loaded(name) for name in still_waiting() if name in made])

    made = makers(settings, compiles, warm, ready)
    for name, make in made.items():
        when_loaded(name, functools.partial(_apply, make, apply_late))
    return f"{len(made)} modules are watched for"


def warm_runner(runner: Any, compiles: Compiles) -> Any:
    """Warm a runner whose models are loaded. A model of another structure is reported, not raised.

    Raises NothingToWarmError, since a silent warm-up of nothing would be taken for a good one.
    """
    from dspark_deploy.plugin.amd.layer_pass import StructureError
    from dspark_deploy.plugin.amd.runner import limits, loaded_models
    from dspark_deploy.plugin.amd.warmup import Report, warm

    stages = int(runner.vllm_config.parallel_config.pipeline_parallel_size)
    if stages > 1:
        return Report(
            skipped=f"pipeline parallelism ({stages} stages) is not covered; kernels compile when used"
        )
    max_tokens, sizes = limits(runner)
    try:
        return warm(loaded_models(runner), max_tokens, sizes, compiles)
    except StructureError as error:
        logger.error("dspark-deploy: no warm-up: %s; kernels compile when they are first used", error)
        return Report(skipped=str(error))


def _apply(make: Callable[[ModuleType], Patch], apply_late: Apply, module: ModuleType) -> None:
    apply_late([make(module)])


def _never_loaded(name: str) -> Patch:
    short = {draft: f"fused-post:{draft.split('.')[2]}" for draft in DRAFTS}.get(name, f"watch:{name}")
    return Patch(
        short,
        name,
        "needs a module that this process has not loaded",
        lambda: not_applicable("not loaded by the time this worker was ready: nothing here uses it"),
        lambda: "",
    )
