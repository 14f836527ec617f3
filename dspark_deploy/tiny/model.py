"""The tiny target (Qwen3) and its DSpark draft, as trained. vLLM serves what they export.

The draft reads what the target computed for the tokens before an anchor, and fills a block behind that anchor
in one pass: slot i of the block predicts the token at anchor + 1 + i. A Markov head then adds, slot by slot,
what the token just drafted says about the next one. The draft owns neither embedding nor head: it uses the
target's, and its checkpoint leaves both out.

Shapes as in `layers`, and: A anchors in each sequence, K slots in a block, V tokens of vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark_deploy.tiny.layers import Context, Layer, RMSNorm, Rotation, Shape, rotation_table

TARGET_SHAPE = Shape(layers=3)


@dataclass(frozen=True)
class DraftShape(Shape):
    """The draft's sizes, and how it is tied to its target."""

    layers: int = 1
    block: int = 7
    markov_rank: int = 16
    target_layers: tuple[int, ...] = (0, 1, 2)
    mask_token: int = 2


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)


class Target(nn.Module):
    """Qwen3ForCausalLM with an untied head."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        _keep_table(self, shape)
        _initialise(self.model.layers, generator)
        for table in (self.model.embed_tokens, self.lm_head):
            nn.init.normal_(table.weight, std=0.02, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]."""
        return self.logits(self.layer_outputs(tokens)[-1])

    def layer_outputs(self, tokens: Tensor) -> list[Tensor]:
        """[B, T] -> what leaves each layer, before the last norm: one [B, T, D] a layer."""
        rotation = _table(self).first(tokens.shape[1])
        states = [self.model.embed_tokens(tokens)]
        for layer in self.model.layers:
            states.append(layer(states[-1], rotation))
        return states[1:]

    def logits(self, states: Tensor) -> Tensor:
        """The last layer's output [..., D] -> logits [..., V]."""
        return self.lm_head(self.model.norm(states))


class Draft(nn.Module):
    """Qwen3DSparkModel. Its parameters have no "model." in front: vLLM adds that as it loads them."""

    def __init__(self, shape: DraftShape, target: Target, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        self.fc = nn.Linear(len(shape.target_layers) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden)
        self.markov_head = nn.ModuleDict(
            {
                "markov_w1": nn.Embedding(shape.vocabulary, shape.markov_rank),
                "markov_w2": nn.Linear(shape.markov_rank, shape.vocabulary, bias=False),
            }
        )
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(shape.hidden + shape.markov_rank, 1)})
        _keep_table(self, shape)
        self._shared = (
            target.model.embed_tokens,
            target.lm_head,
        )  # in a tuple, so that torch doesn't own them
        _initialise(self.layers, generator)
        _initialise(self.fc, generator)
        nn.init.normal_(self.markov_head["markov_w1"].weight, std=0.5, generator=generator)
        for module in (self.markov_head["markov_w2"], self.confidence_head["proj"]):
            nn.init.zeros_(module.weight)
        nn.init.zeros_(self.confidence_head["proj"].bias)

    def features(self, outputs: list[Tensor]) -> Tensor:
        """What the draft reads of the target's layer outputs: [B, T, len(target_layers) * D]."""
        return torch.cat([outputs[layer] for layer in self.shape.target_layers], -1)

    def blocks(
        self, features: Tensor, anchors: Tensor, tokens: Tensor, length: int, kept: Tensor | None = None
    ) -> Tensor:
        """Fill one block of `length` slots behind every anchor: hidden states [B, A, K, D].

        `features` [B, T, len(target_layers) * D] from the target, `anchors` [B, A] positions, `tokens` [B, A]
        the tokens there. `kept` [B, A] cuts blocks short: no slot sees those from `kept` on.
        """
        batch, count = anchors.shape
        offsets = torch.arange(length)
        queries = torch.full((batch, count, length), self.shape.mask_token)
        queries[..., 0] = tokens
        positions = (anchors[..., None] + offsets).clamp(max=self.shape.positions - 1).flatten(1)
        mask = self._mask(features.shape[1], anchors, length, kept)
        context = Context(self.hidden_norm(self.fc(features)), _table(self).first(features.shape[1]))
        x = self._shared[0](queries.flatten(1))
        for layer in self.layers:
            x = layer(x, _table(self).at(positions), mask, context)
        return self.norm(x).unflatten(1, (count, length))

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[..., D] and the tokens before each slot [...] -> logits [..., V]."""
        head = self.markov_head
        return self._shared[1](hidden) + head["markov_w2"](head["markov_w1"](previous))

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """As `logits`, but the logit of each slot's chance to be accepted, [...]."""
        known = torch.cat([hidden, self.markov_head["markov_w1"](previous)], -1)
        return self.confidence_head["proj"](known).squeeze(-1)

    @staticmethod
    def _mask(context: int, anchors: Tensor, length: int, kept: Tensor | None) -> Tensor:
        """[B, 1, A * K, C + A * K]: a slot sees the context before its anchor, and all of its own block."""
        batch, count = anchors.shape
        before = torch.arange(context) < anchors[..., None]
        block = torch.arange(count).repeat_interleave(length)
        same = (block[:, None] == block).expand(batch, -1, -1)
        if kept is not None:
            in_use = (torch.arange(length) < kept[..., None]).flatten(1)
            same = same & in_use[:, None] | torch.eye(count * length, dtype=torch.bool)
        return torch.cat([before.repeat_interleave(length, 1), same], -1)[:, None]


def round_to_bfloat16(module: nn.Module) -> None:
    """Give every parameter the value that it will have when served; it stays float32, and is frozen."""
    for weight in module.eval().requires_grad_(False).parameters():
        weight.copy_(weight.to(torch.bfloat16))


def _keep_table(module: nn.Module, shape: Shape) -> None:
    """The rotation at every position, as buffers, which go where the module goes."""
    for name, values in rotation_table(shape)._asdict().items():
        module.register_buffer(name, values, persistent=False)


def _table(module: nn.Module) -> Rotation:
    return Rotation(module.get_buffer("cos"), module.get_buffer("sin"))


def _initialise(module: nn.Module, generator: torch.Generator) -> None:
    for weight in module.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.7 * weight.shape[1] ** -0.5, generator=generator)
