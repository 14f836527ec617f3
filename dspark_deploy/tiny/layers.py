"""Qwen3 layers for training, in plain torch. Parameter names are those that vLLM and transformers load.

Shapes in the docstrings: B sequences, T tokens, C tokens of context, D hidden size, H heads, E head size. No
cache and no generation: vLLM serves the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes that target and draft have in common; `layers` is where they differ."""

    layers: int
    vocabulary: int = 352
    hidden: int = 96
    intermediate: int = 256
    heads: int = 3
    kv_heads: int = 1
    head_size: int = 32
    positions: int = 1024
    rope_theta: float = 10_000.0


class Rotation(NamedTuple):
    """Cosine and sine of the rotary embedding at some positions, each [T, E] or [B, 1, T, E]."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> Rotation:
        """The rotation at `positions` [B, T]."""
        return Rotation(self.cos[positions][:, None], self.sin[positions][:, None])

    def first(self, length: int) -> Rotation:
        """The rotation at positions 0 to `length` - 1."""
        return Rotation(self.cos[:length], self.sin[:length])

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate `heads` [B, H, T, E]."""
        first, second = heads.chunk(2, -1)
        return heads * self.cos + torch.cat([-second, first], -1) * self.sin


class Context(NamedTuple):
    """Tokens that a draft's layer attends to but does not transform: [B, C, D], and their rotation."""

    states: Tensor
    rotation: Rotation


def rotation_table(shape: Shape) -> Rotation:
    """The rotation at every position, [positions, E]."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
    angles = torch.outer(torch.arange(shape.positions).float(), frequencies).repeat(1, 2)
    return Rotation(angles.cos(), angles.sin())


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPSILON)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_size)
        self.k_norm = RMSNorm(shape.head_size)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None, context: Context | None) -> Tensor:
        """[B, T, D] -> [B, T, D]. `mask` [B, 1, T, C + T] is True where a token sees a key; None: causal."""
        query = rotation.apply(self._split(self.q_norm, self.q_proj(x)))
        key, value = self._keys_values(x, rotation)
        if context is not None:
            context_key, context_value = self._keys_values(context.states, context.rotation)
            key, value = torch.cat([context_key, key], 2), torch.cat([context_value, value], 2)
        seen = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(seen.transpose(1, 2).flatten(2))

    def _keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return rotation.apply(self._split(self.k_norm, self.k_proj(x))), self._split(None, self.v_proj(x))

    def _split(self, norm: RMSNorm | None, x: Tensor) -> Tensor:
        """[B, T, heads * E] -> [B, heads, T, E], normalised for each head."""
        heads = x.unflatten(-1, (-1, self.shape.head_size))
        return (heads if norm is None else norm(heads)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)

    def forward(
        self, x: Tensor, rotation: Rotation, mask: Tensor | None = None, context: Context | None = None
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask, context)
        return x + self.mlp(self.post_attention_layernorm(x))
