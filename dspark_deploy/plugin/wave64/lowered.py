"""What TileLang makes of a kernel: its HIP source, and whether a reduction's group starts where it must.

    misaligned(source(kernel, function))      reductions that lose lanes; empty for a right kernel

Lowering needs no GPU and takes seconds a kernel, so it is asked only where a kernel's own text isn't
understood. It is one lowering, for gfx950 and a wavefront of 64, of plain options at hidden size 1024.

Not covered: options other than the defaults, and races.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from dspark_deploy.plugin.wave64.thread_groups import NotUnderstoodError

HIDDEN, STREAMS = 1024, 4
MIXES = STREAMS * (STREAMS + 2)
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "gemm_out_mul": ((1, 1, MIXES), "float32"),
    "gemm_out_sqrsum": ((1, 1), "float32"),
    "hc_scale": ((3,), "float32"),
    "hc_base": ((MIXES,), "float32"),
    "residual": ((1, STREAMS, HIDDEN), "bfloat16"),
    "residual_out": ((1, STREAMS, HIDDEN), "bfloat16"),
    "post_mix": ((1, STREAMS), "float32"),
    "comb_mix": ((1, STREAMS * STREAMS), "float32"),
    "layer_input": ((1, HIDDEN), "bfloat16"),
    "norm_weight": ((HIDDEN,), "bfloat16"),
    "pre_mix_in": ((1, STREAMS), "float32"),
    "pre_mix_out": ((1, STREAMS), "float32"),
    "aux_out": ((1, HIDDEN), "bfloat16"),
}
NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "norm_eps"), 1e-6),
    **{"hidden_size": HIDDEN, "hc_post_mult_value": 2.0, "sinkhorn_repeat": 20, "n_splits": 1},
}
REDUCTION = re.compile(r"AllReduce<[^<>]*?,\s*(\d+),\s*\d+,\s*(\d+)[^<>]*>")
# Other ways by which a generated source has lanes read each other's registers.
EXCHANGES = re.compile(r"__shfl\w*|\bwarp_reduce\w*|ds_bpermute\w*|\bCumSum\w*|readlane\w*|update_dpp\w*")
WAVE = 64
# What TileLang and TVM raise for a kernel that they can't parse or lower.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError, ImportError)


def source(kernel: Any, function: Callable[..., Any]) -> str:
    """The HIP source of a TileLang kernel object, whose Python function is `function`.

    Raises NotUnderstoodError where an argument isn't known, or TileLang doesn't lower it.
    """
    parameters = inspect.signature(function).parameters
    unknown = [
        name
        for name, parameter in parameters.items()
        if name not in SHAPES and name not in NUMBERS and parameter.default is inspect.Parameter.empty
    ]
    if unknown:
        raise NotUnderstoodError(f"unknown arguments {unknown}")
    try:
        return _lowered(kernel if hasattr(kernel, "get_tir") else _decorated(function), list(parameters))
    except FAILURES as error:
        raise NotUnderstoodError(f"TileLang doesn't lower it: {type(error).__name__}: {error}") from error


def _decorated(function: Any) -> Any:
    """TileLang's object of a function whose decoration vLLM puts off to the first call, out of sight."""
    import tilelang
    import tilelang.language

    from dspark_deploy.kernels.mhc_pre_tilelang import PASS_CONFIGS

    # A kernel's text names both; vLLM sets them likewise before it decorates.
    function.__globals__.update(tilelang=tilelang, T=tilelang.language)
    return tilelang.jit(pass_configs=PASS_CONFIGS)(function)


def _lowered(kernel: Any, names: list[str]) -> str:
    import tilelang
    import torch
    from tilelang import tvm

    shapes = dict(SHAPES)
    if "residual_out" in names:
        shapes["residual"] = ((1, HIDDEN), "bfloat16")
    tensors = [
        torch.empty(shapes[name][0], dtype=getattr(torch, shapes[name][1]), device="meta")
        for name in names
        if name in shapes
    ]
    program = kernel.get_tir(*tensors, **{name: NUMBERS[name] for name in names if name in NUMBERS})
    passes = {getattr(key, "value", key): value for key, value in (kernel.pass_configs or {}).items()}
    target = tvm.target.Target({"kind": "hip", "mcpu": "gfx950", "thread_warp_size": WAVE})
    with tvm.transform.PassContext(opt_level=3, config=passes), target:
        return str(tilelang.lower(program, target=target).kernel_source)


def misaligned(generated: str) -> list[str]:
    """Reductions of a generated HIP source whose group doesn't start at a multiple of its own size.

    Raises NotUnderstoodError where lanes exchange values by other means, or where nothing is reduced.
    """
    found = list(REDUCTION.finditer(generated))
    other = sorted(set(EXCHANGES.findall(generated)))
    if other or len(found) != generated.count("AllReduce<"):
        raise NotUnderstoodError(
            f"its generated source exchanges registers by {other or 'another AllReduce'}"
        )
    if not found:
        raise NotUnderstoodError("its generated source holds no AllReduce")
    return [match.group() for match in found if int(match.group(2)) % int(match.group(1))]
