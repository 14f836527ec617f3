"""What target and draft training share: the recipe, the two optimisers with their schedule, the loop.

Muon takes the matrices of the hidden layers, and is what makes training this cheap; AdamW takes embeddings,
heads, gates and norms. After a short warm-up, and as long at the full rate as the recipe says, both rates
fall in a straight line, to nothing at the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark_deploy.tiny.muon import Muon

LOSS_INTERVAL = 10
"""A recorded loss is the mean over this many steps."""
CHECK_INTERVAL = 20
"""In the second half, `optimise` asks this often whether it has done enough."""

INPUTS_OF_DRAFT = ("fc.weight", "main_proj.weight")
"""The matrices that mix the target's layers for a draft, outside of its layers."""

Progress = Callable[[float], None]
"""Called after every step, with its loss."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out, besides the versions of torch and tokenizers and the machine.

    The target is meant to be wrong now and then: a tuner that guards accuracy needs something to guard. What
    accuracy a number of steps gives depends steeply on the seed, and on how the machine rounds; so training
    ends at `exactness` instead.
    """

    target_steps: int = 1000
    """At most."""
    exactness: float = 0.86
    """The share of problems, none of them held out, that the target has exact when its training ends."""
    draft_steps: int = 350
    batch: int = 32
    anchors: int = 12
    """Blocks that the draft learns from in each sequence."""
    short_blocks: float = 0.5
    """The share of blocks cut short: vLLM fills as many slots as it is told to, and those see no others."""
    seed: int = 0
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    warm_up: int = 30
    full_rate: float = 0.0
    """The share of the steps taken at the full rate, before it falls."""
    threads: int = 1
    """Another number of threads takes sums in another order, so this is part of the recipe. Two gain a
    quarter of the time where both have a core to themselves, and lose several times that where not."""


@dataclass(frozen=True)
class RecordedLoss:
    step: int
    loss: float


def optimise(
    module: nn.Module,
    steps: int,
    recipe: Recipe,
    next_loss: Callable[[], Tensor],
    progress: Progress,
    enough: Callable[[], bool] = lambda: False,
) -> list[RecordedLoss]:
    """Take `steps` steps on what `next_loss` gives, fewer once `enough`; return the losses on the way."""
    optimisers = _optimisers(module, recipe)
    recorded: list[RecordedLoss] = []
    recent: list[float] = []
    for step in range(steps):
        loss = next_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["full_rate"] * _rate(step, steps, recipe)
            optimiser.step()
            optimiser.zero_grad()
        recent.append(loss.item())
        progress(recent[-1])
        done = step == steps - 1 or (step >= steps // 2 and (step + 1) % CHECK_INTERVAL == 0 and enough())
        if len(recent) == LOSS_INTERVAL or done:
            recorded.append(RecordedLoss(step + 1, round(sum(recent) / len(recent), 5)))
            recent.clear()
        if done:
            break
    return recorded


def _optimisers(module: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in module.named_parameters():
        path = name.split(".")
        projects = weight.dim() == 2 and path[-2].endswith("_proj")
        is_hidden = (projects and "layers" in path) or name in INPUTS_OF_DRAFT
        if weight.requires_grad:
            (hidden if is_hidden else others).append(weight)
    muon = Muon(hidden, lr=recipe.muon_rate)
    adam = torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for optimiser in (muon, adam):
        for group in optimiser.param_groups:
            group["full_rate"] = group["lr"]
    return [muon, adam]


def _rate(step: int, steps: int, recipe: Recipe) -> float:
    """The share of the full learning rate at `step`."""
    left = (1 - step / steps) / (1 - recipe.full_rate)
    return min(1.0, (step + 1) / recipe.warm_up) * min(1.0, left)
