"""What a trained pair is worth on held-out problems, without vLLM: exactness, and acceptance length.

`python -m dspark_deploy.tiny.train` writes both into MANIFEST.json. Both are teacher-forced, so they say
nothing of how a solution goes on after a wrong token. That can still end in the right answer, so the accuracy
of final answers, which takes vLLM to measure, can be a little above the exactness here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from dspark_deploy.tiny.architectures import AnyDraft, AnyTarget
from dspark_deploy.tiny.data import Batch, agreed, encode
from dspark_deploy.tiny.language import ACCURACY_SEEDS, Problem, problems
from dspark_deploy.tiny.tokenizer import PAD

SEED = ACCURACY_SEEDS[0]
EXACTNESS_PROBLEMS = 1200
ACCEPTANCE_PROBLEMS = 200
SLOTS = (1, 3, 5, 7)


def report(target: AnyTarget, draft: AnyDraft, tokenizer: Tokenizer) -> dict[str, Any]:
    """Both, as MANIFEST.json holds them."""
    asked = problems(SEED, EXACTNESS_PROBLEMS)
    fewer = asked[:ACCEPTANCE_PROBLEMS]
    lengths = {slots: acceptance_length(target, draft, tokenizer, fewer, slots) for slots in SLOTS}
    return {
        "exact": {"problems": EXACTNESS_PROBLEMS, **exactness(target, tokenizer, asked)},
        "acceptance_length": {
            "problems": ACCEPTANCE_PROBLEMS,
            **{f"k{slots}": length for slots, length in lengths.items()},
        },
    }


@torch.no_grad()
def exactness(target: AnyTarget, tokenizer: Tokenizer, asked: list[Problem]) -> dict[str, float]:
    """The share of problems whose every response token is the target's choice: of all, and by operations."""
    exact: Counter[int] = Counter()
    for operations, batch in _batches(tokenizer, asked):
        exact[operations] += int(_exact(target, batch).sum())
    counts = Counter(problem.operations for problem in asked)
    shares = {f"{number}_operations": exact[number] / counts[number] for number in sorted(counts)}
    return {name: round(share, 4) for name, share in {"all": exact.total() / len(asked), **shares}.items()}


@torch.no_grad()
def acceptance_length(
    target: AnyTarget, draft: AnyDraft, tokenizer: Tokenizer, asked: list[Problem], slots: int
) -> float | None:
    """Tokens a step of greedy DSpark, on those problems that the target has exact; None if none."""
    steps = generated = 0
    for _, batch in _batches(tokenizer, asked):
        for row in _exact(target, batch).nonzero().flatten():
            used = batch.tokens[row] != PAD
            tokens, response = batch.tokens[row][used], batch.response[row][used]
            first = int(response.nonzero()[0])
            drafted = _drafted(target, draft, tokens, first, slots)
            wanted = F.pad(tokens, (0, slots - 1), value=-1).unfold(0, slots, 1)[first + 1 :]
            hits = (drafted == wanted).int().cumprod(1).sum(1).tolist()
            position = 0
            while position < len(hits):
                steps, generated = steps + 1, generated + hits[position] + 1
                position += hits[position] + 1
    return round(generated / steps, 4) if steps else None


def _batches(tokenizer: Tokenizer, asked: list[Problem], size: int = 100) -> list[tuple[int, Batch]]:
    """The problems by number of operations, and that number with each batch."""
    found = []
    for operations in sorted({problem.operations for problem in asked}):
        same = [problem for problem in asked if problem.operations == operations]
        found += [(operations, encode(tokenizer, same[at : at + size])) for at in range(0, len(same), size)]
    return found


def _exact(target: AnyTarget, batch: Batch) -> Tensor:
    """[B]: the target chooses every token of the response."""
    return (agreed(target(batch.tokens), batch) == batch.response).all(1)


def _drafted(target: AnyTarget, draft: AnyDraft, tokens: Tensor, first: int, slots: int) -> Tensor:
    """What the draft proposes behind each position from `first` to the last but one: [positions, slots]."""
    outputs = target.layer_outputs(tokens[None])
    anchors = torch.arange(first, len(tokens) - 1)[None]
    hidden = draft.blocks(draft.features(outputs), anchors, tokens[anchors], slots)
    chain = [tokens[anchors]]
    for slot in range(slots):
        chain.append(draft.logits(hidden[:, :, slot], chain[-1]).argmax(-1))
    return torch.cat(chain[1:]).T
