"""Problems as batches of tokens. A batch holds problems with the same number of operations, to pad little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from dspark_deploy.tiny.language import Problem, prompt, stream
from dspark_deploy.tiny.tokenizer import EOS, PAD


class Batch(NamedTuple):
    """`tokens` [B, T], padded on the right; `response` [B, T] is True on the solution and the end of text."""

    tokens: Tensor
    response: Tensor


def training_batches(tokenizer: Tokenizer, seed: int, size: int) -> Iterator[Batch]:
    """Batches of the problems of `seed` without end; no problem comes twice."""
    return (encode(tokenizer, group) for group in _groups(stream(seed), size))


def encode(tokenizer: Tokenizer, problems: list[Problem]) -> Batch:
    # Prompt and response are encoded apart, for vLLM sees the prompt alone.
    prompts = [coded.ids for coded in tokenizer.encode_batch([prompt(problem) for problem in problems])]
    solutions = tokenizer.encode_batch([f" {problem.solution}" for problem in problems])
    responses = [[*coded.ids, EOS] for coded in solutions]
    longest = max(len(before) + len(after) for before, after in zip(prompts, responses, strict=True))
    tokens = torch.full((len(problems), longest), PAD, device="cpu")
    response = torch.zeros(len(problems), longest, dtype=torch.bool, device="cpu")
    for row, (before, after) in enumerate(zip(prompts, responses, strict=True)):
        end = len(before) + len(after)
        tokens[row, :end] = torch.tensor(before + after, device="cpu")
        response[row, len(before) : end] = True
    device = torch.get_default_device()
    return Batch(tokens.to(device), response.to(device))


def agreed(target_logits: Tensor, batch: Batch) -> Tensor:
    """[B, T]: the token is of the response, and the target would have chosen it and all before it."""
    chosen = F.pad(target_logits[:, :-1].argmax(-1), (1, 0))
    agrees = (chosen == batch.tokens) | ~batch.response
    return batch.response & agrees.int().cumprod(1).bool()


def _groups(problems: Iterable[Problem], size: int) -> Iterator[list[Problem]]:
    waiting: dict[int, list[Problem]] = defaultdict(list)
    for problem in problems:
        group = waiting[problem.operations]
        group.append(problem)
        if len(group) == size:
            yield waiting.pop(problem.operations)
