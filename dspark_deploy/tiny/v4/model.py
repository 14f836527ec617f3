"""The tiny DeepSeek-V4 target and its DSpark stages, as trained. vLLM serves what they export.

The stages read what the target computed for the tokens before an anchor, and fill a block behind that anchor
in one pass, as `dspark_deploy.tiny.model` describes; they own neither embedding nor head. What they read of a
target layer is the mean of its streams.

Shapes: B sequences, T tokens, n streams, D hidden size, A anchors, K slots, V tokens of vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark_deploy.tiny.v4.attention import (
    Attention,
    Context,
    RMSNorm,
    Rotation,
    keep_table,
    kept_table,
    linear,
)
from dspark_deploy.tiny.v4.experts import MixtureOfExperts
from dspark_deploy.tiny.v4.mhc import HyperConnection, HyperHead, expand
from dspark_deploy.tiny.v4.shape import V4DraftShape, V4Shape


class Layer(nn.Module):
    def __init__(self, shape: V4Shape, ratio: int, generator: torch.Generator) -> None:
        super().__init__()
        self.self_attn = Attention(shape, ratio, generator)
        self.mlp = MixtureOfExperts(shape, generator)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.attn_hc = HyperConnection(shape, generator)
        self.ffn_hc = HyperConnection(shape, generator)

    def forward(
        self,
        streams: Tensor,
        rotation: Rotation,
        mask: Tensor,
        table: Rotation,
        context: Context | None = None,
    ) -> Tensor:
        """[B, T, n, D] -> [B, T, n, D]."""
        batch, length, *_ = streams.shape
        flat = streams.flatten(0, 1)
        x, mix = self.attn_hc(flat)
        x = self.input_layernorm(x).unflatten(0, (batch, length))
        flat = expand(self.self_attn(x, rotation, mask, table, context).flatten(0, 1), flat, mix)
        x, mix = self.ffn_hc(flat)
        flat = expand(self.mlp(self.post_attention_layernorm(x)), flat, mix)
        return flat.unflatten(0, (batch, length))


class Decoder(nn.Module):
    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.3, generator=generator)
        self.layers = nn.ModuleList(Layer(shape, ratio, generator) for ratio in shape.compression)
        self.norm = RMSNorm(shape.hidden)
        self.hc_head = HyperHead(shape, generator)


class Target(nn.Module):
    """DeepseekV4ForCausalLM."""

    def __init__(self, shape: V4Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, generator)
        self.lm_head = linear(shape.hidden, shape.vocabulary, generator, 0.3)
        keep_table(self, shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]."""
        return self.logits(self.layer_outputs(tokens)[-1])

    def layer_outputs(self, tokens: Tensor) -> list[Tensor]:
        """[B, T] -> the streams that leave each layer: one [B, T, n, D] a layer."""
        length = tokens.shape[1]
        at = torch.arange(length)
        mask = ((at <= at[:, None]) & (at > at[:, None] - self.shape.window))[None]
        table = kept_table(self)
        streams = [self.model.embed_tokens(tokens).unsqueeze(2).expand(-1, -1, self.shape.streams, -1)]
        for layer in self.model.layers:
            streams.append(layer(streams[-1], table.at(at), mask, table))
        return streams[1:]

    def logits(self, streams: Tensor) -> Tensor:
        """The last layer's streams [..., n, D] -> logits [..., V]."""
        gathered = self.model.hc_head(streams.reshape(-1, *streams.shape[-2:]))
        return self.lm_head(self.model.norm(gathered)).unflatten(0, streams.shape[:-2])


class Draft(nn.Module):
    """The DSpark stages, under `mtp.*` in the target's checkpoint."""

    def __init__(self, shape: V4DraftShape, target: Target, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape, ratio, generator) for ratio in shape.compression)
        self.main_proj = linear(len(shape.target_layers) * shape.hidden, shape.hidden, generator)
        self.main_norm, self.norm = RMSNorm(shape.hidden), RMSNorm(shape.hidden)
        self.hc_head = HyperHead(shape, generator)
        self.markov_w1 = nn.Embedding(shape.vocabulary, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.vocabulary, bias=False)
        self.confidence_proj = nn.Linear(shape.hidden + shape.markov_rank, 1, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.5, generator=generator)
        nn.init.zeros_(self.markov_w2.weight)
        nn.init.zeros_(self.confidence_proj.weight)
        keep_table(self, shape)
        self._shared = (target.model.embed_tokens, target.lm_head)  # a tuple, so that torch doesn't own them

    def features(self, outputs: list[Tensor]) -> Tensor:
        """What the stages read of the target's layer outputs: [B, T, len(target_layers) * D]."""
        return torch.cat([outputs[layer].mean(2) for layer in self.shape.target_layers], -1)

    def blocks(
        self, features: Tensor, anchors: Tensor, tokens: Tensor, length: int, kept: Tensor | None = None
    ) -> Tensor:
        """Fill one block of `length` slots behind every anchor: hidden states [B, A, K, D], before the norm.

        `features` [B, T, len(target_layers) * D] from the target, `anchors` [B, A] positions, `tokens` [B, A]
        the tokens there. `kept` [B, A] cuts blocks short: no slot sees those from `kept` on.
        """
        batch, count = anchors.shape
        queries = torch.full((batch, count, length), self.shape.mask_token)
        queries[..., 0] = tokens
        positions = (anchors[..., None] + torch.arange(length)).clamp(max=self.shape.positions - 1).flatten(1)
        at, table = torch.arange(features.shape[1]), kept_table(self)
        context = Context(self.main_norm(self.main_proj(features)), table.at(at))
        mask = self._mask(features.shape[1], anchors, length, kept)
        streams = self._shared[0](queries.flatten(1)).unsqueeze(2).expand(-1, -1, self.shape.streams, -1)
        for layer in self.layers:
            streams = layer(streams, table.at(positions), mask, table, context)
        return self.hc_head(streams.flatten(0, 1)).unflatten(0, (batch, count, length))

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[..., D] and the tokens before each slot [...] -> logits [..., V]."""
        return self._shared[1](self.norm(hidden)) + self.markov_w2(self.markov_w1(previous))

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """As `logits`, but the logit of each slot's chance to be accepted, [...]."""
        return self.confidence_proj(torch.cat([hidden, self.markov_w1(previous)], -1)).squeeze(-1)

    def _mask(self, context: int, anchors: Tensor, length: int, kept: Tensor | None) -> Tensor:
        """[B, A * K, C + A * K]: a slot sees the window before its anchor, and all of its own block."""
        batch, count = anchors.shape
        at = torch.arange(context)
        before = (at < anchors[..., None]) & (at >= anchors[..., None] - self.shape.window)
        block = torch.arange(count).repeat_interleave(length)
        same = (block[:, None] == block).expand(batch, -1, -1)
        if kept is not None:
            in_use = (torch.arange(length) < kept[..., None]).flatten(1)
            same = same & in_use[:, None] | torch.eye(count * length, dtype=torch.bool)
        return torch.cat([before.repeat_interleave(length, 1), same], -1)
