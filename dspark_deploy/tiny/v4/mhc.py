"""Manifold-constrained hyper-connections (mHC) for training: N streams of residual instead of one.

    x, mix = connection(streams)          # what the sublayer reads, and how its output is to be mixed in
    streams = expand(sublayer(x), streams, mix)

Formulas as in transformers' DeepseekV4HyperConnection. Shapes: P tokens (sequences flattened), n streams, D
hidden size. The mixing weights lie as [n, n, P], so that each step of Sinkhorn is one pass over long rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark_deploy.tiny.v4.shape import HC_EPSILON, NORM_EPSILON, V4Shape


class Sinkhorn(torch.autograd.Function):
    """Columns, then rows and columns in turn, divided by their sums: [n, n, P] to nearly doubly stochastic.

    The gradient of y = x / (sum(x) + eps) needs y and the divisor only; autograd would keep three times that.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, iterations: int) -> Tensor:
        """`weights` [row, column, P], positive; `iterations` as hc_sinkhorn_iters."""
        kept = []
        for half in range(2 * iterations - 1):
            dim = half % 2  # sums over rows (a column's sum) first
            inverse = (weights.sum(dim, keepdim=True) + HC_EPSILON).reciprocal()
            weights = weights * inverse
            kept += [weights, inverse]
        # Kept by other means, the result would hold itself, and all of this until Python's collector comes.
        ctx.save_for_backward(*kept)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The exact gradient."""
        (gradient,) = gradients
        halves = list(zip(ctx.saved_tensors[::2], ctx.saved_tensors[1::2], strict=True))
        for half, (result, inverse) in reversed(list(enumerate(halves))):
            dim = half % 2
            gradient = (gradient - (gradient * result).sum(dim, keepdim=True)) * inverse
        return gradient, None


class Mix(NamedTuple):
    """How a sublayer's output joins the streams."""

    post: Tensor
    """[n, P]: the output's weight in each stream."""
    comb: Tensor
    """[n, n, P]: how much of each old stream (first index) is in each new one."""


class HyperConnection(nn.Module):
    """Gathers the streams into one sublayer's input, and says how its output goes back."""

    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__()
        n = self.streams = shape.streams
        self.iterations = shape.sinkhorn
        self.fn = nn.Parameter(torch.randn((2 + n) * n, n * shape.hidden, generator=generator) * 0.02)
        base = torch.randn((2 + n) * n, generator=generator) * 0.3
        base[2 * n :] += 2 * torch.eye(n).flatten()  # each stream mostly keeps to itself at first
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        part = torch.tensor([0] * n + [1] * n + [2] * n * n)
        self.register_buffer("part", part, persistent=False)

    def forward(self, streams: Tensor) -> tuple[Tensor, Mix]:
        """[P, n, D] -> the sublayer's input [P, D], and the mix for `expand`."""
        n = self.streams
        flat = streams.flatten(1)
        weights = F.linear(flat, self.fn).float() * _inverse_rms(flat)
        weights = (weights * self.scale[self.get_buffer("part")] + self.base).t().contiguous()
        pre = weights[:n].sigmoid() + HC_EPSILON
        post = 2 * weights[n : 2 * n].sigmoid()
        comb = weights[2 * n :].view(n, n, -1).softmax(1) + HC_EPSILON
        comb = Sinkhorn.apply(comb, self.iterations)
        return _weighted(pre, streams), Mix(post, comb)


def expand(output: Tensor, streams: Tensor, mix: Mix) -> Tensor:
    """new[j] = sum over i of comb[i, j] * streams[i] + post[j] * output: [P, D], [P, n, D] -> [P, n, D]."""
    mixed = [
        _weighted(mix.comb[:, stream], streams) + post.unsqueeze(-1) * output
        for stream, post in enumerate(mix.post)
    ]
    return torch.stack(mixed, 1)


class HyperHead(nn.Module):
    """Gathers the streams behind the last layer: [P, n, D] -> [P, D]."""

    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__()
        n = shape.streams
        self.hc_fn = nn.Parameter(torch.randn(n, n * shape.hidden, generator=generator) * 0.02)
        self.hc_base = nn.Parameter(torch.randn(n, generator=generator) * 0.3)
        self.hc_scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, streams: Tensor) -> Tensor:
        flat = streams.flatten(1)
        weights = F.linear(flat, self.hc_fn).float() * _inverse_rms(flat)
        gates = (weights * self.hc_scale + self.hc_base).sigmoid() + HC_EPSILON
        return _weighted(gates.t(), streams)


def _weighted(weights: Tensor, streams: Tensor) -> Tensor:
    """[n, P], [P, n, D] -> [P, D]. Thousands of products of 4 by 4 take torch.bmm several times as long."""
    terms = [weight.unsqueeze(-1) * stream for weight, stream in zip(weights, streams.unbind(1), strict=True)]
    return sum(terms[1:], terms[0])


def _inverse_rms(flat: Tensor) -> Tensor:
    """[P, n * D] -> [P, 1], fp32."""
    return torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + NORM_EPSILON)
