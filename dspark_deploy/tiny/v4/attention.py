"""DeepSeek-V4's attention for training: one key that is the value as well, a window, and compressed entries.

Formulas as in transformers' DeepseekV4Attention and DeepseekV4CSACompressor. Shapes: B sequences, T tokens,
C tokens of context, W compressed entries, D hidden size, H heads of 512, the last 64 of which are rotated.

Not covered: the indexer's choice. It keeps the best `index_chosen` (512) entries, all there are up to 2048
tokens, so its weights never matter here; they are there because checkpoints have them, and stay as drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark_deploy.tiny.v4.shape import COMPRESSION, HEAD_SIZE, NORM_EPSILON, ROTATED, V4Shape

MASKED = -1e9


class Rotation(NamedTuple):
    """Cosine and sine of the rotary embedding at some positions, each [..., T, ROTATED / 2]."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> Rotation:
        """The rotation at `positions`."""
        return Rotation(self.cos[positions], self.sin[positions])

    def heads(self) -> Rotation:
        """The same for tensors [B, T, H, E]."""
        return Rotation(self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))

    def back(self) -> Rotation:
        """The rotation by the negative angle."""
        return Rotation(self.cos, -self.sin)

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the last `ROTATED` channels, in neighbouring pairs."""
        even, odd = x[..., -ROTATED::2], x[..., -ROTATED + 1 :: 2]
        turned = torch.stack([even * self.cos - odd * self.sin, odd * self.cos + even * self.sin], -1)
        return torch.cat([x[..., :-ROTATED], turned.flatten(-2)], -1)


class Context(NamedTuple):
    """Tokens that a draft stage attends to but does not transform: [B, C, D], and their rotation."""

    states: Tensor
    rotation: Rotation


def rotation_table(shape: V4Shape) -> Rotation:
    """The rotation at every position, [positions, ROTATED / 2]."""
    frequencies = shape.rope_theta ** (-torch.arange(0, ROTATED, 2) / ROTATED)
    angles = torch.outer(torch.arange(shape.positions).float(), frequencies)
    return Rotation(angles.cos(), angles.sin())


def keep_table(module: nn.Module, shape: V4Shape) -> None:
    """The rotation at every position, as buffers, which go where the module goes."""
    for name, values in rotation_table(shape)._asdict().items():
        module.register_buffer(name, values, persistent=False)


def kept_table(module: nn.Module) -> Rotation:
    """What `keep_table` put into it."""
    return Rotation(module.get_buffer("cos"), module.get_buffer("sin"))


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPSILON)


def linear(inputs: int, outputs: int, generator: torch.Generator, gain: float = 1.0) -> nn.Linear:
    """A linear map without bias, whose outputs have about `gain` times the inputs' standard deviation."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5, generator=generator)
    return layer


class Pooling(nn.Module):
    """An entry for each `COMPRESSION` tokens, gated over those and as many before: [B, T, D] -> [B, W, E]."""

    def __init__(self, hidden: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.size = size
        self.kv_proj = linear(hidden, 2 * size, generator)
        self.gate_proj = linear(hidden, 2 * size, generator)
        self.position_bias = nn.Parameter(torch.zeros(COMPRESSION, 2 * size))
        self.kv_norm = RMSNorm(size)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """`rotation` is that of all positions; an entry has the position of its own first token."""
        whole = x[:, : x.shape[1] // COMPRESSION * COMPRESSION]
        values = self.kv_proj(whole).unflatten(1, (-1, COMPRESSION))
        gates = self.gate_proj(whole).unflatten(1, (-1, COMPRESSION)) + self.position_bias
        weights = self._overlapped(gates, float("-inf")).float().softmax(2)
        entries = self.kv_norm((self._overlapped(values, 0.0) * weights).sum(2))
        return rotation.at(torch.arange(entries.shape[1]) * COMPRESSION).apply(entries)

    def _overlapped(self, series: Tensor, first: float) -> Tensor:
        """[B, W, 4, 2E] -> [B, W, 8, E]: the first half of the window before, then this one's second half."""
        before = F.pad(series[:, :-1, :, : self.size], (0, 0, 0, 0, 1, 0), value=first)
        return torch.cat([before, series[..., self.size :]], 2)


class Indexer(Pooling):
    """The lightning indexer's weights, frozen: see the module's docstring."""

    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__(shape.hidden, shape.index_size, generator)
        self.q_b_proj = linear(shape.query_rank, shape.index_heads * shape.index_size, generator)
        self.scorer = nn.ModuleDict({"weights_proj": linear(shape.hidden, shape.index_heads, generator)})
        self.requires_grad_(False)


class Compressor(Pooling):
    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__(shape.hidden, HEAD_SIZE, generator)
        self.indexer = Indexer(shape, generator)


class Attention(nn.Module):
    def __init__(self, shape: V4Shape, ratio: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_a_proj = linear(shape.hidden, shape.query_rank, generator)
        self.q_a_norm = RMSNorm(shape.query_rank)
        self.q_b_proj = linear(shape.query_rank, shape.heads * HEAD_SIZE, generator)
        self.kv_proj = linear(shape.hidden, HEAD_SIZE, generator)
        self.kv_norm = RMSNorm(HEAD_SIZE)
        self.o_a_proj = linear(shape.heads * HEAD_SIZE, shape.output_rank, generator, 0.7)
        self.o_b_proj = linear(shape.output_rank, shape.hidden, generator, 0.7)
        self.sinks = nn.Parameter(torch.zeros(shape.heads))
        self.compressor = Compressor(shape, generator) if ratio else None

    def forward(
        self, x: Tensor, rotation: Rotation, mask: Tensor, table: Rotation, context: Context | None
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]. `mask` [1 or B, T, C + T] is True where a token sees a key."""
        batch, length, _ = x.shape
        query = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).unflatten(-1, (self.heads, HEAD_SIZE))
        query = rotation.heads().apply(F.rms_norm(query, (HEAD_SIZE,), None, NORM_EPSILON))
        keys = [self._keys(x, rotation)]
        if context is not None:
            keys.insert(0, self._keys(context.states, context.rotation))
        if self.compressor is not None and length >= COMPRESSION:
            keys.append(self.compressor(x, table))
            entries = torch.arange(keys[-1].shape[1]) < ((torch.arange(length) + 1) // COMPRESSION)[:, None]
            mask = torch.cat([mask, entries.expand(len(mask), -1, -1)], -1)
        key = torch.cat(keys, 1).to(query.dtype)
        flat = query.transpose(1, 2).reshape(batch, self.heads * length, HEAD_SIZE)
        scores = (flat @ key.mT).unflatten(1, (self.heads, length)) * HEAD_SIZE**-0.5
        scores = scores.masked_fill(~mask[:, None], MASKED)
        sinks = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(batch, -1, length, 1)
        odds = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(key.dtype)
        seen = (odds.flatten(1, 2) @ key).unflatten(1, (self.heads, length)).transpose(1, 2)
        return self.o_b_proj(self.o_a_proj(rotation.heads().back().apply(seen).flatten(2)))

    def _keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotation.apply(self.kv_norm(self.kv_proj(x)))
