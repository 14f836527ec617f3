"""Train the tiny DSpark draft against its frozen target.

The draft must learn what the target says, and generating that text would cost more than the training. So it
learns from the data, as far as the target's own first choice is the data's token: up to there, the text is
what the target would have generated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from dspark_deploy.tiny.architectures import AnyDraft, AnyTarget
from dspark_deploy.tiny.data import Batch, agreed, training_batches
from dspark_deploy.tiny.language import TRAINING_SEEDS
from dspark_deploy.tiny.loop import Progress, Recipe, RecordedLoss, optimise

DATA_SEED = TRAINING_SEEDS[1]
POSITION_DECAY = math.exp(-1 / 4)
"""A slot counts this much less than the one before it: it is used only if that one was accepted."""


class Blocks(NamedTuple):
    """What the draft is to fill in, for A anchors in each of B sequences and K slots behind each anchor."""

    anchors: Tensor
    """[B, A] positions."""
    kept: Tensor
    """[B, A] slots in use."""
    tokens: Tensor
    """[B, A, K + 1]: the anchor's token, then the K tokens behind it."""
    valid: Tensor
    """[B, A, K]: the slots to learn from."""


def train_draft(
    draft: AnyDraft,
    target: AnyTarget,
    recipe: Recipe,
    tokenizer: Tokenizer,
    generator: torch.Generator,
    progress: Progress,
) -> list[RecordedLoss]:
    """Train `draft` in place, and return its losses. `generator` draws the anchors."""
    data = training_batches(tokenizer, DATA_SEED, recipe.batch)

    def next_loss() -> Tensor:
        return draft_loss(draft, target, next(data), recipe, generator)

    return optimise(draft, recipe.draft_steps, recipe, next_loss, progress)


def draft_loss(
    draft: AnyDraft, target: AnyTarget, batch: Batch, recipe: Recipe, generator: torch.Generator
) -> Tensor:
    """Cross entropy, distance to the target's distribution, and the confidence head's own loss, weighted."""
    with torch.no_grad():
        outputs = target.layer_outputs(batch.tokens)
        target_logits = target.logits(outputs[-1])
    blocks = choose_blocks(target_logits, batch, draft.shape.block, recipe, generator)
    previous, wanted = blocks.tokens[..., :-1], blocks.tokens[..., 1:]
    hidden = draft.blocks(
        draft.features(outputs), blocks.anchors, previous[..., 0], draft.shape.block, blocks.kept
    )
    logits = draft.logits(hidden, previous)
    target_odds = _behind(target_logits, blocks.anchors, draft.shape.block).softmax(-1)

    cross_entropy = F.cross_entropy(logits.movedim(-1, 1), wanted, reduction="none")
    distance = (logits.softmax(-1) - target_odds).abs().sum(-1)
    # Half the distance is the chance that rejection sampling turns the slot's token down.
    accepted = (1 - distance.detach() / 2).clamp(0, 1)
    confidence = F.binary_cross_entropy_with_logits(
        draft.confidence(hidden, previous), accepted, reduction="none"
    )
    weight = blocks.valid * POSITION_DECAY ** torch.arange(draft.shape.block)
    loss = 0.3 * cross_entropy + 0.7 * distance + 0.3 * confidence
    return (loss * weight).sum() / weight.sum().clamp(min=1)


def choose_blocks(
    target_logits: Tensor, batch: Batch, length: int, recipe: Recipe, generator: torch.Generator
) -> Blocks:
    """Random anchors on the target's own path, some of their blocks cut short."""
    on_path = agreed(target_logits, batch)
    # Wherever vLLM drafts, the anchor is a token of the response, and so is the first one drafted.
    possible = F.pad(on_path[:, :-1] & on_path[:, 1:], (0, 1))
    # Drawn on the CPU, whatever the device, so that a seed means the same anchors everywhere.
    device = possible.device
    lots = torch.rand(possible.shape, generator=generator, device="cpu").to(device).masked_fill(~possible, -1)
    drawn, anchors = lots.topk(recipe.anchors, 1)
    short = torch.rand(anchors.shape, generator=generator, device="cpu") < recipe.short_blocks
    cut = torch.randint(1, length, anchors.shape, generator=generator, device="cpu")
    kept = torch.where(short, cut, length).to(device)
    tokens = _behind(F.pad(batch.tokens, (0, length))[..., None], anchors, length + 1).squeeze(-1)
    followed = _behind(F.pad(on_path, (0, length))[..., None], anchors + 1, length).squeeze(-1)
    in_use = torch.arange(length) < kept[..., None]
    return Blocks(anchors, kept, tokens, followed & in_use & (drawn >= 0)[..., None])


def _behind(values: Tensor, anchors: Tensor, length: int) -> Tensor:
    """`values` [B, T, X] at each anchor and the `length` - 1 positions after it: [B, A, length, X]."""
    positions = (anchors[..., None] + torch.arange(length)).clamp(max=values.shape[1] - 1)
    rows = torch.arange(len(values))[:, None, None]
    return values[rows, positions]
