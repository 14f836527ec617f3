"""mHC pre as two launches, `mix` then `collapse`, with a plain torch twin of each.

The formulas are those of manifold-constrained hyper-connections as DeepSeek-V4 uses them (vLLM's
`mhc_pre_torch` and `mhc_pre_delayed_torch` compute the same): with m = projection * rsqrt(mean(x*x) +
rms_eps), of 24 values,

    pre  = sigmoid(m[0:4] * scale[0] + base[0:4]) + pre_eps
    post = sigmoid(m[4:8] * scale[1] + base[4:8]) * post_mult
    comb = sinkhorn(m[8:24] * scale[2] + base[8:24])          4 by 4: softmax, then rows and columns in turn
    layer_input = sum over streams of pre * residual, and RMSNorm of that where a weight is given

The twins compute in the dtype of their inputs: on fp64 inputs they are the reference that kernels are
measured against. Importing this module imports torch and nothing else; TileLang at the first launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

HC = 4
MIXES = HC * (HC + 2)


@dataclass(frozen=True, slots=True)
class Constants:
    """What a model fixes for all its mHC layers. `norm_eps` counts only where there is a norm weight."""

    rms_eps: float = 1e-6
    pre_eps: float = 1e-6
    sinkhorn_eps: float = 1e-6
    post_mult: float = 2.0
    sinkhorn_repeat: int = 20
    norm_eps: float = 1e-6


class Mixed(NamedTuple):
    """pre [tokens, 4], post [tokens, 4], comb [tokens, 4, 4]."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def sinkhorn_ref(logits: torch.Tensor, eps: float, repeat: int) -> torch.Tensor:
    """Softmax over rows, then columns and rows normalised in turn, `repeat` times in all. [..., 4, 4]."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mix_ref(
    gemm_mul: torch.Tensor,
    gemm_sqrsum: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    constants: Constants,
    rms_numel: int,
) -> Mixed:
    """Twin of `mix`: gemm_mul [n_splits, tokens, 24], gemm_sqrsum [n_splits, tokens], scale, base.

    Unlike the kernel it takes any number of streams n, whose n * (n + 2) coefficients gemm_mul has.
    """
    streams = math.isqrt(gemm_mul.shape[-1] + 1) - 1
    rms = torch.rsqrt(gemm_sqrsum.sum(0) / rms_numel + constants.rms_eps)
    gate = torch.cat([scale[i : i + 1].expand(size) for i, size in enumerate((streams, streams, streams**2))])
    logits = gemm_mul.sum(0) * rms[:, None] * gate + base
    return Mixed(
        torch.sigmoid(logits[:, :streams]) + constants.pre_eps,
        torch.sigmoid(logits[:, streams : 2 * streams]) * constants.post_mult,
        sinkhorn_ref(
            logits[:, 2 * streams :].unflatten(-1, (streams, streams)),
            constants.sinkhorn_eps,
            constants.sinkhorn_repeat,
        ),
    )


def collapse_ref(
    pre: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> torch.Tensor:
    """Twin of `collapse`, without its rounding to bf16: [tokens, hidden]. No `pre` means stream zero."""
    out = residual[:, 0] if pre is None else (pre[:, :, None] * residual).sum(1)
    if norm_weight is None:
        return out
    return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps) * norm_weight


class Plan(NamedTuple):
    """Block size of `collapse`: `split` blocks a token, of `threads` threads that move `vector` elements."""

    split: int
    threads: int
    vector: int


def plan(hidden_size: int, with_norm: bool) -> Plan:
    """The block for a hidden size. Raises ValueError where no block covers it evenly.

    Without a norm blocks are independent, so a token is spread over as many as it fills; with one, a block
    has the whole row. Measured with `bench/gpu/kernels.py`.
    """
    for threads, vector in ((128, 8), (64, 8), (64, 4)) if not with_norm else ((256, 4), (128, 4), (64, 4)):
        if hidden_size % (threads * vector) == 0:
            return Plan(1 if with_norm else hidden_size // (threads * vector), threads, vector)
    raise ValueError(f"hidden size {hidden_size} is no multiple of 256: mHC pre has no block for it")


@cache
def _jit(name: str) -> Any:
    """A kernel function under TileLang's own JIT: one cache, and what watches TileLang sees it as well."""
    import tilelang

    from dspark_deploy.kernels import mhc_pre_tilelang

    return tilelang.jit(getattr(mhc_pre_tilelang, name), pass_configs=mhc_pre_tilelang.PASS_CONFIGS)


def mix_kernel(
    n_splits: int, rms_numel: int, constants: Constants, threads: int = 64, pdl: bool = False
) -> Any:
    """The compiled `mix` for the device at hand; the first call compiles, which takes seconds.

    None while a warm-up only writes down what is asked for.
    """
    return _jit("mix")(**mix_parameters(n_splits, rms_numel, constants, threads, pdl))


def collapse_kernel(
    hidden_size: int,
    norm_eps: float | None,
    block: Plan,
    stream_zero: bool = False,
    write_aux: bool = False,
    pdl: bool = False,
) -> Any:
    """The compiled `collapse`; `norm_eps` is None without a norm. Otherwise as `mix_kernel`."""
    return _jit("collapse")(**collapse_parameters(hidden_size, norm_eps, block, stream_zero, write_aux, pdl))


def mix_parameters(
    n_splits: int, rms_numel: int, constants: Constants, threads: int = 64, pdl: bool = False
) -> dict[str, Any]:
    """The compile-time parameters of `mhc_pre_tilelang.mix`."""
    return {
        "n_splits": n_splits,
        "rms_numel": rms_numel,
        "rms_eps": constants.rms_eps,
        "pre_eps": constants.pre_eps,
        "sinkhorn_eps": constants.sinkhorn_eps,
        "post_mult": constants.post_mult,
        "sinkhorn_repeat": constants.sinkhorn_repeat,
        "threads": threads,
        "pdl": pdl,
    }


def collapse_parameters(
    hidden_size: int,
    norm_eps: float | None,
    block: Plan,
    stream_zero: bool = False,
    write_aux: bool = False,
    pdl: bool = False,
) -> dict[str, Any]:
    """The compile-time parameters of `mhc_pre_tilelang.collapse`."""
    return {
        "hidden_size": hidden_size,
        "with_norm": norm_eps is not None,
        "norm_eps": norm_eps or 0.0,
        "split": block.split,
        "threads": block.threads,
        "vector": block.vector,
        "stream_zero": stream_zero,
        "write_aux": write_aux,
        "pdl": pdl,
    }


def mix(
    gemm_mul: torch.Tensor,
    gemm_sqrsum: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    constants: Constants,
    rms_numel: int,
    out: Mixed | None = None,
) -> Mixed:
    """Launch `mix` on the tensors' device, all fp32. Shapes as in `mix_ref`; writes and returns `out`.

    Raises ValueError where there aren't 4 streams, which the kernel is written for.
    """
    n_splits, tokens, mixes = gemm_mul.shape
    if mixes != MIXES:
        raise ValueError(
            f"mHC pre has kernels for {HC} streams ({MIXES} coefficients), not {mixes} coefficients"
        )
    if out is None:
        new = gemm_mul.new_empty
        out = Mixed(new(tokens, HC), new(tokens, HC), new(tokens, HC, HC))
    if tokens:
        kernel = mix_kernel(n_splits, rms_numel, constants)
        if kernel is not None:
            kernel(gemm_mul, gemm_sqrsum, scale, base, out.pre, out.post, out.comb.view(tokens, HC * HC))
    return out


def collapse(
    pre: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    out: torch.Tensor | None = None,
    aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch `collapse`: pre [tokens, 4] fp32 or None, residual [tokens, 4, hidden] and weight [hidden] bf16.

    Writes `out` and, if given, `aux` ([tokens, hidden] bf16), and returns `out`. Raises ValueError for a
    hidden size that is no multiple of 256.
    """
    tokens, _, hidden = residual.shape
    if out is None:
        out = residual.new_empty(tokens, hidden)
    if tokens:
        kernel = collapse_kernel(
            hidden,
            None if norm_weight is None else norm_eps,
            plan(hidden, norm_weight is not None),
            stream_zero=pre is None,
            write_aux=aux is not None,
        )
        if kernel is not None:
            kernel(
                residual.new_empty(tokens, HC, dtype=torch.float32) if pre is None else pre,
                residual,
                residual.new_empty(hidden) if norm_weight is None else norm_weight,
                out,
                out if aux is None else aux,
            )
    return out
