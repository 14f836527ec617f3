"""Inputs, outputs and fp64 references of each mHC kernel, vLLM's and ours.

A case knows its tensors by the names of the kernel's own parameters. The reference is computed in fp64 from
the very inputs that the kernel gets, so it isn't blurred by their rounding. What a kernel has no business
writing must come back untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from dspark_deploy.kernels import mhc_pre
from dspark_deploy.kernels.mhc_pre import HC, MIXES

CONSTANTS = mhc_pre.Constants()
FILLS = {torch.bfloat16: (torch.int16, -1), torch.float32: (torch.int32, -1)}  # all ones: NaN
BF16_NRMSE, FP32_NRMSE = 4e-3, 1e-5  # one rounding to bf16 is 1.7e-3, two are 2.4e-3

# vLLM's kernels by a short name. 0.27.1 has all of these as well.
UPSTREAM = {
    "pre": "mhc_pre_big_fuse_tilelang",
    "pre_with_norm": "mhc_pre_big_fuse_with_norm_tilelang",
    "pre_broadcast_with_norm": "mhc_pre_big_fuse_broadcast_with_norm_tilelang",
    "post": "mhc_post_tilelang",
    "fused_post_pre": "mhc_fused_tilelang",
    "head": "hc_head_fuse_tilelang",
    "prenorm_gemm": "hc_prenorm_gemm_tilelang",
}


class Output:
    """An output tensor filled with NaN, and how often kernels wrote to it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.writes = shape, dtype, 0
        kind, self._fill = FILLS[dtype]
        self.bits = torch.full((torch.Size(shape).numel(),), self._fill, dtype=kind)

    @property
    def tensor(self) -> torch.Tensor:
        """It in its own type and shape, on the same memory."""
        return self.bits.view(self.dtype).view(self.shape)

    def values(self) -> torch.Tensor:
        return self.tensor.double()

    def untouched(self) -> bool:
        return self.writes == 0 and bool((self.bits == self._fill).all())


@dataclass
class Case:
    """One launch. A reference of None says that the output must stay untouched."""

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, Output]
    references: dict[str, torch.Tensor | None]
    grid: tuple[int, int, int]
    scalars: dict[str, int]
    # Output -> what makes it comparable to its reference, such as the sum over splits.
    folds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Error:
    """How one output differs: ratio of norms, NRMSE, NaN count, and whether it met its tolerance."""

    ratio: float
    nrmse: float
    nans: int
    right: bool


def errors(case: Case) -> dict[str, Error]:
    """Each output against its reference; what isn't the kernel's to write must be untouched."""
    found = {}
    for name, output in case.outputs.items():
        reference = case.references[name]
        if reference is None:
            found[name] = Error(1.0, 0.0, 0, output.untouched())
            continue
        got = case.folds.get(name, lambda tensor: tensor)(output.values())
        wanted = ~reference.isnan()  # a row that is NaN must come out as NaN
        norm = reference[wanted].norm()
        ratio = float(got[wanted].norm() / norm)
        nrmse = float((got - reference)[wanted].norm() / norm)
        tolerance = BF16_NRMSE if output.dtype is torch.bfloat16 else FP32_NRMSE
        kept = bool(got[~wanted].isnan().all())
        found[name] = Error(ratio, nrmse, int(got[wanted].isnan().sum()), nrmse < tolerance and kept)
    return found


def _random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def constants(params: dict[str, Any]) -> mhc_pre.Constants:
    """The constants that a kernel is compiled with, by vLLM's names or by ours."""
    given = {name.removeprefix("hc_").removesuffix("_value"): value for name, value in params.items()}
    known = {each.name: getattr(CONSTANTS, each.name) for each in fields(CONSTANTS)}
    return mhc_pre.Constants(**{name: given.get(name, value) for name, value in known.items()})


def _edges(residual: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """With `edge_rows`, a row of zeros, one of NaN as in the padding of a captured graph, and a small one."""
    if params.get("edge_rows"):
        residual[0], residual[2], residual[3] = 0.0, float("nan"), residual[3] * 1e-3
    return residual


def _projected(
    hidden: int, n_splits: int, streams: int, residual: torch.Tensor, params: dict[str, Any]
) -> dict[str, Any]:
    """What the projection in front hands over, split along its inner dimension, and the model's constants."""
    tokens, width = len(residual), streams * hidden
    fn = torch.randn(MIXES, width, dtype=torch.float64) / width**0.5
    x = residual.reshape(tokens, width).double()
    parts = x.view(tokens, n_splits, -1)
    mul = torch.einsum("tsk,osk->sto", parts, fn.view(MIXES, n_splits, -1)).float().contiguous()
    given = {
        "gemm_out_mul": mul,
        "gemm_out_sqrsum": parts.square().sum(-1).t().float().contiguous(),
        "hc_scale": (torch.rand(3, dtype=torch.float64) + 0.5).float(),
        "hc_base": _random(MIXES),
    }
    if params.get("edge_rows"):  # a logit of about 100, whose exponential no float holds
        mean = given["gemm_out_sqrsum"][:, 1].sum() / (params.get("rms_numel") or width)
        rms = torch.sqrt(mean + constants(params).rms_eps)
        mul[0, 1, 2 * HC + 5] += 100 * rms / given["hc_scale"][2]
    return given


def _pre(name: str, hidden: int, tokens: int, params: dict[str, Any]) -> Case:
    n_splits = params.get("n_splits", 1)
    broadcast, norm = "broadcast" in name, "with_norm" in name
    scales = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)[:, None]
    streams = 1 if broadcast else HC
    shape = (tokens, hidden) if broadcast else (tokens, HC, hidden)
    residual = (torch.randn(*shape, dtype=torch.float64) * (2.0 if broadcast else scales)).bfloat16()
    residual, known = _edges(residual, params), constants(params)
    given = _projected(hidden, n_splits, streams, residual, params) | {"residual": residual}
    if norm:
        given["norm_weight"] = (1 + 0.2 * torch.randn(hidden, dtype=torch.float64)).bfloat16()
    given["pre_mix_in"] = torch.rand(tokens, HC)
    save, split_mode = params.get("save_pre_mix", False), params.get("split_mode", "fused")
    mixed = mhc_pre.mix_ref(
        given["gemm_out_mul"].double(),
        given["gemm_out_sqrsum"].double(),
        given["hc_scale"].double(),
        given["hc_base"].double(),
        known,
        params.get("rms_numel") or streams * hidden,
    )
    streams_in = residual.double()[:, None].expand(-1, HC, -1) if broadcast else residual.double()
    coefficient: torch.Tensor | None = mixed.pre
    if params.get("use_pre_mix_in"):
        coefficient = given["pre_mix_in"].double()
    elif save:
        coefficient = None
    weight = given["norm_weight"].double() if norm else None
    collapsed = mhc_pre.collapse_ref(coefficient, streams_in, weight, known.norm_eps)
    mixes, collapses = split_mode != "input", split_mode != "stats"
    outputs = {
        "post_mix": Output((tokens, HC), torch.float32),
        "comb_mix": Output((tokens, HC * HC), torch.float32),
        "layer_input": Output((tokens, hidden), torch.bfloat16),
        "pre_mix_out": Output((tokens, HC), torch.float32),
        "aux_out": Output((tokens, hidden), torch.bfloat16),
    }
    references = {
        "post_mix": mixed.post if mixes else None,
        "comb_mix": mixed.comb.flatten(1) if mixes else None,
        "layer_input": collapsed if collapses else None,
        "pre_mix_out": mixed.pre if save and mixes else None,
        "aux_out": streams_in.mean(1) if params.get("write_aux") and collapses else None,
    }
    if broadcast:
        outputs["residual_out"] = Output((tokens, HC, hidden), torch.bfloat16)
        references["residual_out"] = streams_in
    return Case(given, outputs, references, (tokens, 1, 1), {})


def _post(name: str, hidden: int, tokens: int, params: dict[str, Any]) -> Case:
    comb, post = torch.rand(tokens, HC, HC), 2 * torch.rand(tokens, HC)
    residual = _random(tokens, HC, hidden, dtype=torch.bfloat16, scale=2.0)
    x = _random(tokens, hidden, dtype=torch.bfloat16)
    new = torch.einsum("tij,tih->tjh", comb.double(), residual.double())
    new += post.double()[:, :, None] * x.double()[:, None]
    out = Output((tokens, HC, hidden), torch.bfloat16)
    if name == "post":
        return Case({"a": comb, "b": residual, "c": post, "d": x}, {"x": out}, {"x": new}, (tokens, 1, 1), {})
    n_thr, tile_n = params["n_thr"], params["tile_n"]
    splits = params.get("splits", 8)
    while hidden % (splits * n_thr):
        splits //= 2
    weight = _random(MIXES, HC, hidden, scale=(HC * hidden) ** -0.5)
    return Case(
        {"comb_mix": comb, "residual_in": residual, "post_mix": post, "x_in": x, "weight_t": weight},
        {
            "yp_out": Output((splits, tokens, MIXES), torch.float32),
            "rp_out": Output((splits, tokens), torch.float32),
            "residual_out": out,
        },
        {
            "yp_out": torch.einsum("tjh,ojh->to", new, weight.double()),
            "rp_out": new.square().sum((1, 2)),
            "residual_out": new,
        },
        (tokens, MIXES // tile_n, splits),
        {"split_k": splits},
        {"yp_out": lambda tensor: tensor.sum(0), "rp_out": lambda tensor: tensor.sum(0)},
    )


def _head(name: str, hidden: int, tokens: int, params: dict[str, Any]) -> Case:
    residual = _random(tokens, HC, hidden, dtype=torch.bfloat16, scale=2.0)
    fn = _random(HC, HC * hidden, scale=(HC * hidden) ** -0.5)
    scale, base = torch.tensor([1.3]), _random(HC)
    x = residual.double().flatten(1)
    rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + CONSTANTS.rms_eps)
    gate = torch.sigmoid(x @ fn.double().t() * rms * scale.double() + base.double()) + CONSTANTS.pre_eps
    given = {"residual": residual, "fn": fn, "hc_scale": scale, "hc_base": base}
    want = (gate[:, :, None] * residual.double()).sum(1)
    return Case(given, {"out": Output((tokens, hidden), torch.bfloat16)}, {"out": want}, (tokens, 1, 1), {})


def _prenorm_gemm(name: str, hidden: int, tokens: int, params: dict[str, Any]) -> Case:
    n_splits, width = params.get("n_splits", 1), HC * hidden
    x = _random(tokens, width, dtype=torch.bfloat16, scale=2.0)
    fn = _random(MIXES, width, scale=width**-0.5)
    xs, fns = x.double().view(tokens, n_splits, -1), fn.double().view(MIXES, n_splits, -1)
    return Case(
        {"x": x, "fn": fn},
        {
            "out": Output((n_splits, tokens, MIXES), torch.float32),
            "sqrsum": Output((n_splits, tokens), torch.float32),
        },
        {"out": torch.einsum("tsk,osk->sto", xs, fns), "sqrsum": xs.square().sum(-1).t()},
        (tokens, MIXES // params.get("tile_n", 12), n_splits),
        {},
    )


def _mix(name: str, hidden: int, tokens: int, params: dict[str, Any]) -> Case:
    residual = _edges(_random(tokens, HC, hidden, dtype=torch.bfloat16), params)
    given = _projected(hidden, params["n_splits"], HC, residual, params)
    names = {
        "gemm_out_mul": "gemm_mul",
        "gemm_out_sqrsum": "gemm_sqrsum",
        "hc_scale": "scale",
        "hc_base": "base",
    }
    given = {names[key]: value for key, value in given.items()}
    mixed = mhc_pre.mix_ref(
        *(value.double() for value in given.values()), constants(params), params["rms_numel"]
    )
    outputs = {key: Output((tokens, HC), torch.float32) for key in ("pre", "post")}
    outputs["comb"] = Output((tokens, HC * HC), torch.float32)
    blocks = -(-tokens // (params["threads"] // 32))
    references = {"pre": mixed.pre, "post": mixed.post, "comb": mixed.comb.flatten(1)}
    return Case(given, outputs, references, (blocks, 1, 1), {})


def _collapse(name: str, hidden: int, tokens: int, params: dict[str, Any]) -> Case:
    residual = _edges(_random(tokens, HC, hidden, dtype=torch.bfloat16), params)
    pre = torch.rand(tokens, HC)
    weight = (1 + 0.2 * torch.randn(hidden, dtype=torch.float64)).bfloat16()
    want = mhc_pre.collapse_ref(
        None if params["stream_zero"] else pre.double(),
        residual.double(),
        weight.double() if params["with_norm"] else None,
        params["norm_eps"],
    )
    outputs = {key: Output((tokens, hidden), torch.bfloat16) for key in ("layer_input", "aux")}
    aux = residual.double().mean(1) if params["write_aux"] else None
    return Case(
        {"pre": pre, "residual": residual, "norm_weight": weight},
        outputs,
        {"layer_input": want, "aux": aux},
        (tokens, params["split"], 1),
        {},
    )


BUILDERS: dict[str, Callable[[str, int, int, dict[str, Any]], Case]] = {
    **dict.fromkeys(("pre", "pre_with_norm", "pre_broadcast_with_norm"), _pre),
    **dict.fromkeys(("post", "fused_post_pre"), _post),
    "head": _head,
    "prenorm_gemm": _prenorm_gemm,
    "mix": _mix,
    "collapse": _collapse,
}


def case(kernel: str, hidden: int, tokens: int, params: dict[str, Any], seed: int = 0) -> Case:
    """The case of `kernel` with its compile-time `params`; the same seed gives the same inputs."""
    torch.manual_seed(seed)
    built = BUILDERS[kernel](kernel, hidden, tokens, params)
    built.scalars["num_tokens"] = tokens
    return built


def compile_time(kernel: str, hidden: int, options: dict[str, Any]) -> dict[str, Any]:
    """The compile-time parameters of an upstream kernel: the model's constants, and `options`."""
    eps = {
        "rms_eps": CONSTANTS.rms_eps,
        "hc_pre_eps": CONSTANTS.pre_eps,
        "hc_sinkhorn_eps": CONSTANTS.sinkhorn_eps,
        "hc_post_mult_value": CONSTANTS.post_mult,
        "sinkhorn_repeat": CONSTANTS.sinkhorn_repeat,
        "n_splits": 1,
    }
    params: dict[str, dict[str, Any]] = {
        "pre": {"hidden_size": hidden} | eps,
        "pre_with_norm": {"hidden_size": hidden, "norm_eps": CONSTANTS.norm_eps} | eps,
        "pre_broadcast_with_norm": {"hidden_size": hidden, "norm_eps": CONSTANTS.norm_eps} | eps,
        "post": {"hc": HC, "hidden": hidden},
        "fused_post_pre": {"hc": HC, "hidden": hidden, "n_out": MIXES, "n_thr": 128, "tile_n": 2},
        "head": {"hidden_size": hidden, "rms_eps": CONSTANTS.rms_eps, "hc_eps": CONSTANTS.pre_eps},
        "prenorm_gemm": {"hidden_size": hidden, "hc_mult": HC},
    }
    return params[kernel] | options
