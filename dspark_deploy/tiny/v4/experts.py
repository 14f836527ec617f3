"""DeepSeek-V4's mixture of experts for training: a shared expert, and the best few of the routed ones.

Formulas as in transformers' DeepseekV4SparseMoeBlock. All routed experts are computed for every token and the
unchosen weighted with nothing: for four small experts, one large product is cheaper than gathering tokens.
Shapes: P tokens, D hidden size, F intermediate size, X experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark_deploy.tiny.v4.attention import linear
from dspark_deploy.tiny.v4.shape import SWIGLU_LIMIT, V4Shape


class Expert(nn.Module):
    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.intermediate, generator)
        self.up_proj = linear(shape.hidden, shape.intermediate, generator)
        self.down_proj = linear(shape.intermediate, shape.hidden, generator, 0.7)

    def forward(self, x: Tensor) -> Tensor:
        """[P, D] -> [P, D]."""
        return self.down_proj(_swiglu(self.gate_proj(x), self.up_proj(x)))


class Gate(nn.Module):
    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.chosen, self.scale = shape.chosen, shape.routed_scale
        weight = torch.randn(shape.experts, shape.hidden, generator=generator) * shape.hidden**-0.5
        self.weight = nn.Parameter(weight)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        """[P, D] -> each expert's weight [P, X], fp32."""
        scores = F.softplus(F.linear(x, self.weight).float()).sqrt()
        best = (scores.detach() + self.get_buffer("e_score_correction_bias")).topk(self.chosen, -1).indices
        weights = scores * torch.zeros_like(scores).scatter_(1, best, 1.0)
        return weights / weights.sum(-1, keepdim=True) * self.scale


class MixtureOfExperts(nn.Module):
    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.gate = Gate(shape, generator)
        self.experts = nn.ModuleList(Expert(shape, generator) for _ in range(shape.experts))
        self.shared_experts = Expert(shape, generator)

    def forward(self, x: Tensor) -> Tensor:
        """[P, D] -> [P, D]."""
        count = len(self.experts)
        gates = F.linear(x, self._weights("gate_proj", 0)).unflatten(1, (count, -1))
        ups = F.linear(x, self._weights("up_proj", 0)).unflatten(1, (count, -1))
        inner = _swiglu(gates, ups) * self.gate(x).unsqueeze(-1)
        return F.linear(inner.flatten(1), self._weights("down_proj", 1)) + self.shared_experts(x)

    def _weights(self, name: str, dim: int) -> Tensor:
        return torch.cat([expert.get_submodule(name).weight for expert in self.experts], dim)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=SWIGLU_LIMIT)) * up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
