"""Cases for vLLM's mHC operators: random inputs, and what each operator must return, in fp64.

A case is made for one operator class by its name, with the model's own hidden size, streams and constants.
The references start from the very inputs the operator gets, so their rounding isn't counted against it.
Formulas as in `mhc_pre`; a post block is new[j] = post[j] * x + sum over i of comb[i, j] * residual[i].

Not covered: the model-entry broadcast of DeepSeek-V4 on CUDA, and anything behind an operator's `x` argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dspark_deploy.kernels.mhc_pre import Constants, collapse_ref, mix_ref

STREAM_SCALES = (0.5, 1.0, 2.0, 3.0)  # streams that differ, so that a mixed-up stream shows


@dataclass(frozen=True, slots=True)
class Geometry:
    """One model's mHC: hidden size, number of streams, constants, and whether norms are folded in."""

    hidden: int
    streams: int
    constants: Constants
    fused_norm: bool


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """Keyword arguments by vLLM's names, and (output name, fp64 reference) in the order of the results."""

    variant: str
    arguments: dict[str, Any]
    references: list[tuple[str, torch.Tensor]]


class _Inputs:
    """The inputs that all operators share, on the device; the same seed gives the same values anywhere."""

    def __init__(self, geometry: Geometry, tokens: int, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        self._random = torch.Generator().manual_seed(tokens)
        n, hidden = geometry.streams, geometry.hidden
        mixes = n * (n + 2)
        scales = torch.tensor([STREAM_SCALES[i % 4] for i in range(n)])[:, None]
        self.residual = (self.normal(tokens, n, hidden) * scales).to(device, torch.bfloat16)
        self.x = self.normal(tokens, hidden).to(device, torch.bfloat16)
        self.fn = (self.normal(mixes, n * hidden) / (n * hidden) ** 0.5).to(device)
        self.head_fn = (self.normal(n, n * hidden) / (n * hidden) ** 0.5).to(device)
        self.scale = (self.uniform(3) + 0.5).to(device)
        self.base = self.normal(mixes).to(device)
        self.post = (2 * self.uniform(tokens, n)).to(device)
        self.comb = self.uniform(tokens, n, n).to(device)
        self.pre = self.uniform(tokens, n).to(device)
        self.weight = (1 + 0.2 * self.normal(hidden)).to(device, torch.bfloat16)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._random)

    def mixes(self, residual: torch.Tensor) -> Any:
        """Pre, post and comb of streams in fp64."""
        x = residual.flatten(1)
        mul, sqrsum = x @ self.fn.double().t(), x.square().sum(-1)
        constants = self.geometry.constants
        return mix_ref(
            mul[None], sqrsum[None], self.scale.double(), self.base.double(), constants, x.shape[1]
        )

    def collapsed(self, pre: torch.Tensor | None, residual: torch.Tensor, norm: bool) -> torch.Tensor:
        weight = self.weight.double() if norm else None
        return collapse_ref(pre, residual, weight, self.geometry.constants.norm_eps)

    def posted(self) -> torch.Tensor:
        mixed = torch.einsum("tij,tih->tjh", self.comb.double(), self.residual.double())
        return mixed + self.post.double()[..., None] * self.x.double()[:, None]

    def projection(self) -> dict[str, Any]:
        constants = self.geometry.constants
        return {
            "fn": self.fn,
            "hc_scale": self.scale,
            "hc_base": self.base,
            "rms_eps": constants.rms_eps,
            "hc_pre_eps": constants.pre_eps,
            "hc_sinkhorn_eps": constants.sinkhorn_eps,
            "hc_post_mult_value": constants.post_mult,
            "sinkhorn_repeat": constants.sinkhorn_repeat,
        }

    def block(self) -> dict[str, Any]:
        return {"post_layer_mix": self.post[..., None], "comb_res_mix": self.comb}

    def norm(self, norm: bool) -> dict[str, Any]:
        if not norm:
            return {}
        return {"norm_weight": self.weight, "norm_eps": self.geometry.constants.norm_eps}


def _named(mixed: Any, layer_input: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [("post_mix", mixed.post), ("comb_mix", mixed.comb), ("layer_input", layer_input)]


def _pre(given: _Inputs, norm: bool) -> list[OperatorCase]:
    mixed = given.mixes(given.residual.double())
    layer_input = given.collapsed(mixed.pre, given.residual.double(), norm)
    arguments = {"residual": given.residual} | given.projection() | given.norm(norm)
    return [OperatorCase("with norm" if norm else "", arguments, _named(mixed, layer_input))]


def _post(given: _Inputs, norm: bool) -> list[OperatorCase]:
    arguments = {"x": given.x, "residual": given.residual} | given.block()
    return [OperatorCase("", arguments, [("residual", given.posted())])]


def _fused(given: _Inputs, norm: bool) -> list[OperatorCase]:
    new = given.posted()
    mixed = given.mixes(new)
    arguments = {"x": given.x, "residual": given.residual}
    arguments |= given.block() | given.projection() | given.norm(norm)
    references = [("residual", new), *_named(mixed, given.collapsed(mixed.pre, new, norm))]
    return [OperatorCase("with norm" if norm else "", arguments, references)]


def _delayed(given: _Inputs, norm: bool) -> list[OperatorCase]:
    """With the carried pre-mix: alone, and behind the post block of the sublayer before."""
    suffix = " with norm" if norm else ""
    pre, old, new = given.pre.double(), given.residual.double(), given.posted()
    base = {"residual": given.residual, "pre_mix": given.pre} | given.projection() | given.norm(norm)
    alone, behind = given.mixes(old), given.mixes(new)
    return [
        OperatorCase(
            f"carried{suffix}",
            base,
            [
                ("residual", old),
                *_named(alone, given.collapsed(pre, old, norm)),
                ("pre_mix", alone.pre),
            ],
        ),
        OperatorCase(
            f"behind post{suffix}",
            base | given.block() | {"sublayer_out": given.x},
            [
                ("residual", new),
                *_named(behind, given.collapsed(pre, new, norm)),
                ("pre_mix", behind.pre),
            ],
        ),
    ]


def _head(given: _Inputs, norm: bool) -> list[OperatorCase]:
    constants, n = given.geometry.constants, given.geometry.streams
    x = given.residual.double().flatten(1)
    rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + constants.rms_eps)
    logits = x @ given.head_fn.double().t() * rms * given.scale[:1].double() + given.base[:n].double()
    gate = torch.sigmoid(logits) + constants.pre_eps
    arguments = {
        "hidden_states": given.residual,
        "hc_fn": given.head_fn,
        "hc_scale": given.scale[:1],
        "hc_base": given.base[:n],
        "rms_norm_eps": constants.rms_eps,
        "hc_eps": constants.pre_eps,
    }
    return [OperatorCase("", arguments, [("output", (gate[..., None] * given.residual.double()).sum(1))])]


# Operator classes of vLLM's `layers.mhc`, and whether a norm can be folded into them.
BUILDERS: dict[str, tuple[Callable[[_Inputs, bool], list[OperatorCase]], bool]] = {
    "MHCPreOp": (_pre, True),
    "MHCPostOp": (_post, False),
    "MHCFusedPostPreOp": (_fused, True),
    "MHCPreDelayedOp": (_delayed, True),
    "HCHeadOp": (_head, False),
}


def operator_cases(
    operator: str, geometry: Geometry, tokens: int, device: torch.device
) -> list[OperatorCase]:
    """The cases of one operator class at one token count. Raises KeyError for a class that isn't known.

    Where the model folds its norms into the operator, there are cases with a norm weight as well as without.
    """
    build, takes_norm = BUILDERS[operator]
    given = _Inputs(geometry, tokens, device)
    found = build(given, False)
    return found + build(given, True) if takes_norm and geometry.fused_norm else found
