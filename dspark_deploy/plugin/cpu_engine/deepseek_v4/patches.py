"""The patches that let vLLM's CPU build serve DeepSeek-V4 with DSpark, each examined when its module loads.

A process that serves another model loads none of these modules, and pays for a watch on their names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.cpu_engine.deepseek_v4 import experts
from dspark_deploy.plugin.registry import READY, Patch, Verdict, not_applicable, refused, upstream
from dspark_deploy.plugin.when_loaded import when_loaded

LAYERS = "vllm.model_executor.layers.mhc"
BUILDERS = "vllm.models.deepseek_v4.cpu.cpu_mla"
BUILDER, SCHEDULER = "DeepseekV4CPUSparseSWAMetadataBuilder", "build_tile_scheduler"
ROUTER, TOP_K = "vllm.model_executor.layers.fused_moe.router.cpu_router", "biased_topk_cpu"
WINDOWS, ATTENTION = "vllm.v1.attention.backends.mla.sparse_swa", "vllm.models.deepseek_v4.cpu.cpu_sparse"
WINDOW_KERNELS = (
    "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL",
    "_COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL",
    "_COMPUTE_PREFILL_METADATA_KERNEL",
)
WINDOW_RESULTS = ("swa_indices", "swa_lens", "prefill_metadata", "gather_lens")
MODELS, DRAFT = "vllm.models.deepseek_v4", "DSparkDeepseekV4ForCausalLM"
XPU_DRAFT = "vllm.models.deepseek_v4.xpu.dspark"
COMPILED_EXPERTS, COMPILED_TOP_K = (64, 128, 256, 384), (6, 8)
MHC_KERNELS = ("hc_pre_fused_cpu", "hc_post_fused_cpu", "hc_head_fused_cpu")
MHC_OPERATORS = ("MHCPreOp", "MHCPostOp", "MHCFusedPostPreOp")
_libraries: list[Any] = []  # what torch unregisters when it is collected


def hook(provider: str, apply_late: Callable[[list[Patch]], None]) -> Patch:
    """The patch of the general phase: the others come with their modules. `provider` is `mhc.provider`."""

    def install() -> str:
        makers: dict[str, list[Callable[[ModuleType], Patch]]] = {
            LAYERS: [functools.partial(provider_patch, provider=provider)],
            BUILDERS: [scheduler_patch, kernels_patch],
            ROUTER: [router_patch],
            experts.EXPERTS: [experts.experts_patch],
            WINDOWS: [windows_patch],
            MODELS: [draft_patch],
        }
        for name, makes in makers.items():
            when_loaded(name, functools.partial(_apply, makes, apply_late))
        return f"{len(makers)} modules are watched for"

    return Patch(
        "cpu-deepseek-v4", "sys.meta_path", "patches come with their modules", lambda: READY, install
    )


def _apply(
    makes: list[Callable[[ModuleType], Patch]],
    apply_late: Callable[[list[Patch]], None],
    module: ModuleType,
) -> None:
    apply_late([make(module) for make in makes])


def provider_patch(module: ModuleType, provider: str) -> Patch:
    """The patch of vLLM's mHC operators: its C++ kernels, or torch."""
    return Patch(
        "mhc-provider",
        f"{LAYERS}.*.forward_cpu",
        f"mhc.provider: {provider}",
        functools.partial(_examine_provider, module, provider),
        functools.partial(_install_provider, module),
        required=True,
    )


def scheduler_patch(module: ModuleType) -> Patch:
    """The patch of the CPU's metadata builder, whose scheduler lacks DeepSeek-V4.1's layer types."""
    return Patch(
        "cpu-v4-tile-scheduler",
        f"{BUILDERS}.{BUILDER}.{SCHEDULER}",
        "DeepSeek-V4 runs on a CPU: its metadata asks for every layer type's key",
        functools.partial(_examine_scheduler, module),
        functools.partial(_install_scheduler, module),
    )


def kernels_patch(module: ModuleType) -> Patch:
    """The patch of vLLM's kernel library, for CPUs without AVX-512."""
    return Patch(
        "cpu-v4-kernels",
        "torch.ops._C",
        "DeepSeek-V4 runs on a CPU for which vLLM has no kernels: torch's take their names",
        _examine_kernels,
        _install_kernels,
    )


def router_patch(module: ModuleType) -> Patch:
    """The patch of the CPU's routing kernel, which is compiled for a few expert counts."""
    return Patch(
        "cpu-v4-routing",
        f"{ROUTER}.{TOP_K}",
        "expert counts that vLLM's kernel is not compiled for are routed by torch",
        functools.partial(_examine_router, module),
        functools.partial(_install_router, module),
    )


def windows_patch(module: ModuleType) -> Patch:
    """The patch of the window indices, which the CPU's attention makes for itself."""
    return Patch(
        "cpu-v4-windows",
        f"{WINDOWS}.{WINDOW_KERNELS[0]}, ...",
        "a step is not spent on interpreting kernels whose results nobody reads on a CPU",
        functools.partial(_examine_windows, module),
        functools.partial(_install_windows, module),
    )


def draft_patch(module: ModuleType) -> Patch:
    """The patch of the draft's class, which vLLM's CPU build refuses to construct."""
    return Patch(
        "cpu-v4-draft",
        f"{MODELS}.{DRAFT}",
        "DSpark drafts for DeepSeek-V4 on a CPU",
        functools.partial(_examine_draft, module),
        functools.partial(_install_draft, module),
    )


def _has_kernels(names: tuple[str, ...]) -> bool:
    import torch

    return all(hasattr(torch.ops._C, name) for name in names)


def _examine_provider(module: ModuleType, provider: str) -> Verdict:
    if provider not in ("auto", "torch"):
        return refused(f"mhc.provider is {provider}, which a CPU does not have; set auto or torch")
    if provider == "auto" and _has_kernels(MHC_KERNELS):
        return not_applicable("mhc.provider is auto: vLLM's C++ kernels")
    for name in (*MHC_OPERATORS, "HCHeadOp"):
        operator = getattr(module, name, None)
        for method in ("forward_cpu", *(["forward_native"] if name in MHC_OPERATORS else [])):
            if not hasattr(operator, method):
                return refused(f"{LAYERS}.{name} has no {method}")
    return READY


def _install_provider(module: Any) -> str:
    from dspark_deploy.plugin.amd.provider import head

    for name in MHC_OPERATORS:
        operator = getattr(module, name)
        operator.forward_cpu = operator.forward_native
    module.HCHeadOp.forward_cpu = head  # vLLM has no native one
    return "torch" if _has_kernels(MHC_KERNELS) else "torch: vLLM has no C++ kernels for this CPU"


def _layer_types() -> set[str]:
    """The keys that the metadata reads, from the module that reads them."""
    sparse_swa = importlib.import_module(WINDOWS)
    return {value for name, value in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")}


def _examine_scheduler(module: ModuleType) -> Verdict:
    scheduler = getattr(getattr(module, BUILDER, None), SCHEDULER, None)
    if scheduler is None:
        return refused(f"{BUILDERS} has no {BUILDER}.{SCHEDULER}")
    given = scheduler(None, 0)  # it reads nothing of its builder
    if any(value is not None for value in given.values()):
        return refused(f"{SCHEDULER} gives schedules, and the patch is for one that gives none")
    return READY if _layer_types() - given.keys() else upstream("it has every layer type's key")


def _install_scheduler(module: Any) -> str:
    builder = getattr(module, BUILDER)
    original = getattr(builder, SCHEDULER)
    missing = sorted(_layer_types() - original(None, 0).keys())

    @functools.wraps(original)
    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(missing) | original(self, num_decode_tokens)

    setattr(builder, SCHEDULER, build_tile_scheduler)
    return f"added {', '.join(missing)}"


def _examine_kernels() -> Verdict:
    from dspark_deploy.plugin.cpu_engine.deepseek_v4 import kernels

    missing = kernels.missing()
    if not missing:
        return upstream("vLLM has its kernels for this CPU")
    if len(missing) < len(kernels.KERNELS):
        return refused(f"vLLM has some of its kernels here, and lacks {', '.join(missing)}")
    return READY


def _install_kernels() -> str:
    from dspark_deploy.plugin.cpu_engine.deepseek_v4 import kernels

    names = kernels.missing()
    _libraries.append(kernels.register(names))
    return f"{len(names)} kernels in torch"


def _examine_router(module: ModuleType) -> Verdict:
    if not callable(getattr(module, TOP_K, None)):
        return refused(f"{ROUTER} has no {TOP_K}")
    if not _has_kernels((TOP_K,)):
        return not_applicable("vLLM has no routing kernel for this CPU; torch's takes any count")
    from dspark_deploy.plugin.cpu_engine.deepseek_v4.routing import biased_topk_cpu

    found = list(inspect.signature(getattr(module, TOP_K)).parameters)
    if found != list(inspect.signature(biased_topk_cpu).parameters):
        return refused(f"{TOP_K} takes ({', '.join(found)})")
    return READY


def _install_router(module: Any) -> str:
    from dspark_deploy.plugin.cpu_engine.deepseek_v4.routing import biased_topk_cpu

    original = getattr(module, TOP_K)

    @functools.wraps(original)
    def route(hidden_states: Any, gating_output: Any, correction_bias: Any, topk: int, *rest: Any) -> Any:
        compiled = gating_output.shape[1] in COMPILED_EXPERTS and topk in COMPILED_TOP_K
        chosen = original if compiled else biased_topk_cpu
        return chosen(hidden_states, gating_output, correction_bias, topk, *rest)

    setattr(module, TOP_K, route)
    return f"vLLM's kernel serves {COMPILED_EXPERTS} experts of which {COMPILED_TOP_K} are chosen"


class _Unread:
    """Stands for a kernel whose results are not read: called, it does nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        """Leave the results as they are."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def _examine_windows(module: ModuleType) -> Verdict:
    missing = [name for name in WINDOW_KERNELS if not callable(getattr(module, name, None))]
    if missing:
        return refused(f"{WINDOWS} has no {', '.join(missing)}")
    spec = importlib.util.find_spec(ATTENTION)
    source = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
    read = [name for name in WINDOW_RESULTS if name in source]
    if not source or read:
        return refused(f"{ATTENTION} reads {', '.join(read)}" if read else f"there is no {ATTENTION}")
    return READY


def _install_windows(module: Any) -> str:
    for name in WINDOW_KERNELS:
        setattr(module, name, _Unread(getattr(module, name)))
    return f"{len(WINDOW_KERNELS)} kernels are not launched"


def _examine_draft(module: ModuleType) -> Verdict:
    found = getattr(module, DRAFT, None)
    if found is None:
        return refused(f"{MODELS} has no {DRAFT}")
    if hasattr(found, "load_weights"):
        return upstream(f"{found.__module__} has a draft for this platform")
    if importlib.util.find_spec(XPU_DRAFT) is None:
        return refused(f"this vLLM has no {XPU_DRAFT}, of which the CPU's draft is composed")
    return READY


def _install_draft(module: Any) -> str:
    from dspark_deploy.plugin.cpu_engine.deepseek_v4.draft import DSparkDeepseekV4ForCausalLM

    setattr(module, DRAFT, DSparkDeepseekV4ForCausalLM)
    return f"composed of {XPU_DRAFT} and the CPU's layers"
