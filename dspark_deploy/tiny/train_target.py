"""Train the tiny target to predict the solutions, seeing each problem once, until it is exact enough."""

from __future__ import annotations

from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from dspark_deploy.tiny.architectures import AnyTarget
from dspark_deploy.tiny.data import Batch, training_batches
from dspark_deploy.tiny.evaluate import exactness
from dspark_deploy.tiny.language import TRAINING_SEEDS, problems
from dspark_deploy.tiny.loop import Progress, Recipe, RecordedLoss, optimise

DATA_SEED, VALIDATION_SEED = TRAINING_SEEDS[0], TRAINING_SEEDS[3]
VALIDATION_PROBLEMS = 400


def train_target(
    target: AnyTarget, recipe: Recipe, tokenizer: Tokenizer, progress: Progress
) -> list[RecordedLoss]:
    """Train `target` in place, and return its losses."""
    data = training_batches(tokenizer, DATA_SEED, recipe.batch)
    validation = problems(VALIDATION_SEED, VALIDATION_PROBLEMS)

    def next_loss() -> Tensor:
        return target_loss(target, next(data))

    def enough() -> bool:
        return exactness(target, tokenizer, validation)["all"] >= recipe.exactness

    return optimise(target, recipe.target_steps, recipe, next_loss, progress, enough)


def target_loss(target: AnyTarget, batch: Batch) -> Tensor:
    """Mean cross entropy over the response."""
    scored = batch.response[:, 1:]
    states = target.layer_outputs(batch.tokens[:, :-1])[-1][scored]
    return F.cross_entropy(target.logits(states), batch.tokens[:, 1:][scored])
