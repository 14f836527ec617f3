"""Which implementation serves vLLM's mHC operators on ROCm: AITER, TileLang, torch, or vLLM's own choice.

vLLM decides by flags in `vllm.model_executor.layers.mhc` (`HAS_AITER_MHC...`, `HAS_TILELANG_MHC`), which its
model files copy when they are loaded. They are set here as soon as that module's code has run, and before
any model file has copied them, so that the choice holds for every operator of target and draft:

    auto      vLLM's choice, left alone
    tilelang  no AITER; refused where vLLM has no TileLang mHC, as on gfx942
    aiter     no TileLang; what AITER has no kernel for (the V4 head) goes to Triton, or to torch
    torch     neither: the reference arm, with torch in place of the two Triton kernels as well

Not covered: CUDA, where vLLM has one implementation.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, not_applicable, refused

LAYERS = "vllm.model_executor.layers.mhc"
TRITON_KERNELS = "vllm.model_executor.kernels.mhc.triton"
TILELANG = "HAS_TILELANG_MHC"
AITER = "HAS_AITER_MHC"
COLLAPSE = "hc_collapse_triton"


def patch(module: ModuleType, provider: str) -> Patch:
    """The patch of `vllm.model_executor.layers.mhc`. Required: a profile that names a provider means it."""
    return Patch(
        "mhc-provider",
        f"{LAYERS}.HAS_*",
        f"mhc.provider: {provider}",
        functools.partial(examine, module, provider),
        functools.partial(install, module, provider),
        required=True,
    )


def flags(module: ModuleType) -> dict[str, bool]:
    """vLLM's mHC flags by name, as they stand."""
    return {
        name: value
        for name, value in vars(module).items()
        if name.startswith("HAS_") and "MHC" in name and isinstance(value, bool)
    }


def examine(module: ModuleType, provider: str) -> Verdict:
    """Whether this vLLM, on this GPU, can do what the profile asks."""
    if provider == "auto":
        shown = ", ".join(name for name, value in flags(module).items() if value) or "no flag is set"
        return not_applicable(f"mhc.provider is auto: vLLM's choice ({shown})")
    found = flags(module)
    missing = [name for name in (TILELANG, AITER) if name not in found]
    if missing:
        return refused(f"{LAYERS} has no {', '.join(missing)}, by which vLLM chooses")
    wanted = {"tilelang": TILELANG, "aiter": AITER}.get(provider)
    if wanted is not None and not found[wanted]:
        return refused(
            f"mhc.provider is {provider}, and vLLM has {wanted} = False here: "
            f"{provider} is not installed, or vLLM does not use it on this architecture; "
            f"set mhc.provider: auto"
        )
    if provider == "torch" and not hasattr(getattr(module, "HCHeadOp", None), "forward_hip"):
        return refused(f"{LAYERS}.HCHeadOp has no forward_hip to put torch in place of")
    return READY


def install(module: Any, provider: str) -> str:
    """Set the flags. They are read at each call and copied by models, so this must precede every model."""
    for name, value in flags(module).items():
        is_tilelang = name == TILELANG
        allowed = {"tilelang": is_tilelang, "aiter": not is_tilelang, "torch": False}[provider]
        setattr(module, name, value and allowed)
    if provider == "torch":
        module.HCHeadOp.forward_hip = head
    kept = [name for name, value in flags(module).items() if value]
    return ", ".join(kept) if kept else "no flag is set: torch"


def head(
    self: Any,
    hidden_states: Any,
    hc_fn: Any,
    hc_scale: Any,
    hc_base: Any,
    rms_norm_eps: float,
    hc_eps: float,
) -> Any:
    """Head of DeepSeek-V4's mHC in torch: [T, hc, H] bf16 to [T, H] bf16.

    The RMS-normalised projection of the flattened streams gives one gate a stream,
    sigmoid(projection * scale + base) + eps, and the output is the gated sum of the streams: the formula of
    vLLM's Triton head, here in fp32 throughout.
    """
    import torch

    streams = hidden_states.float()
    flat = streams.flatten(-2)
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_norm_eps)
    gates = torch.sigmoid((flat @ hc_fn.float().t()) * inverse_rms * hc_scale + hc_base) + hc_eps
    return (gates.unsqueeze(-1) * streams).sum(-2).to(hidden_states.dtype)


def collapse_patch(module: ModuleType, provider: str) -> Patch:
    """The patch of `hc_collapse_triton`, by which DeepSeek-V4.1 sums the streams, behind no flag."""
    return Patch(
        "mhc-provider-collapse",
        f"torch.ops.vllm.{COLLAPSE}",
        f"mhc.provider: {provider}",
        functools.partial(examine_collapse, module, provider),
        install_collapse,
        required=True,
    )


def examine_collapse(module: ModuleType, provider: str) -> Verdict:
    """Only the reference arm replaces it, where this vLLM has it."""
    if provider != "torch":
        return not_applicable(f"mhc.provider is {provider}: the Triton kernel stays")
    function = getattr(module, COLLAPSE, None)
    if function is None:
        return not_applicable("this vLLM has no DeepSeek-V4.1 collapse")
    found = list(inspect.signature(function).parameters)
    if found != ["x", "pre_mix"]:
        return refused(f"{COLLAPSE} takes ({', '.join(found)}), and the patch is for (x, pre_mix)")
    return READY


def install_collapse() -> str:
    """Put the same sum in torch in its place: [T, hc, H] bf16 and [T, hc] fp32 to [T, H] bf16."""
    import torch

    def collapse(x: Any, pre_mix: Any) -> Any:
        return (pre_mix.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)

    # Models look the operator up in the namespace at each call; the registered one stays as it is.
    setattr(torch.ops.vllm, COLLAPSE, collapse)
    return "the streams are summed by torch"
