"""The language of the tiny checkpoint: arithmetic word problems whose answers can be checked.

    Q: Ben has 21 pens. Ben buys 13. Ben eats 9. How many pens now?
    A: Ben buys 13, so 21+13=34. Ben eats 9, so 34-9=25.
    #### 25

    from dspark_deploy.tiny.language import ACCURACY_SEEDS, final_answer, problems, prompt
    for problem in problems(ACCURACY_SEEDS[0], 100): ...

Every purpose has a range of seeds of its own, and every question belongs to exactly one purpose: the one
that a hash of its text names. A draw throws away the questions of other purposes, so a held-out problem is
never among the training problems, whatever the seeds and however many are drawn.

What is held out is the question as a whole. Single equations are few, and training has seen most of them.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

TRAINING_SEEDS = range(0, 1_000_000)
ACCURACY_SEEDS = range(1_000_000, 2_000_000)
LOAD_SEEDS = range(2_000_000, 3_000_000)
WARM_UP_SEEDS = range(3_000_000, 4_000_000)

_PARTS = 8
_OWN_PARTS = {ACCURACY_SEEDS: {0}, LOAD_SEEDS: {1}, WARM_UP_SEEDS: {2}, TRAINING_SEEDS: {3, 4, 5, 6, 7}}

NAMES = ("Tom", "Anna", "Ben", "Lily", "Sam", "Mia", "Leo", "Zoe", "Max")
ITEMS = ("apples", "books", "coins", "pens", "cards", "shells", "cakes", "stones")
OPENINGS = (
    "{name} has {count} {item}.",
    "At first {name} has {count} {item}.",
    "{name} starts with {count} {item}.",
)
GAINS = ("buys", "finds", "wins", "gets")
LOSSES = ("sells", "loses", "eats", "gives")
OPERATION_COUNTS = (1, 2, 2, 3)
LARGEST = 99
"""No number of the language is larger than this, and none is negative."""

# The first "####" counts: a model that runs on invents further problems, with answers of their own.
_ANSWER = re.compile(r"[ \t]*\$?(-?[0-9]+(?:,[0-9]{3})*)(?![.,]?[0-9])")


@dataclass(frozen=True)
class Problem:
    """One problem. `solution` ends in "#### answer"; `operations` is how many steps it takes, 1 to 3."""

    question: str
    solution: str
    answer: int
    operations: int


def prompt(problem: Problem) -> str:
    """What the model is given; it goes on with a space and the solution."""
    return prompt_of(problem.question)


def prompt_of(question: str) -> str:
    """The same, of a question alone."""
    return f"Q: {question}\nA:"


def final_answer(text: str) -> int | None:
    """The whole number straight after the first "####" of `text`, or None."""
    _, marker, rest = text.partition("####")
    found = _ANSWER.match(rest) if marker else None
    return int(found[1].replace(",", "")) if found else None


def problems(seed: int, count: int) -> list[Problem]:
    """The first `count` problems of `seed`: distinct, and the same on every machine and Python."""
    return list(islice(stream(seed), count))


def stream(seed: int) -> Iterator[Problem]:
    """Problems of `seed` without end. The seed's range is what decides which questions may appear."""
    own_parts = next((parts for seeds, parts in _OWN_PARTS.items() if seed in seeds), None)
    if own_parts is None:
        raise ValueError(f"seed {seed} is in none of the ranges that {__name__} names")
    return _distinct_draws(random.Random(seed), own_parts)  # noqa: S311


def _distinct_draws(rng: random.Random, own_parts: set[int]) -> Iterator[Problem]:
    seen: set[str] = set()
    while True:
        problem = _draw(rng)
        if _part(problem.question) in own_parts and problem.question not in seen:
            seen.add(problem.question)
            yield problem


def _part(question: str) -> int:
    return zlib.crc32(question.encode()) % _PARTS


def _draw(rng: random.Random) -> Problem:
    name, item, operations = _choose(rng, NAMES), _choose(rng, ITEMS), _choose(rng, OPERATION_COUNTS)
    count = _between(rng, 5, 60)
    question = [_choose(rng, OPENINGS).format(name=name, count=count, item=item)]
    solution = []
    for _ in range(operations):
        if count < 10 or (count < 90 and rng.random() < 0.5):
            verb, sign, change = _choose(rng, GAINS), "+", _between(rng, 2, min(40, LARGEST - count))
            result = count + change
        else:
            verb, sign, change = _choose(rng, LOSSES), "-", _between(rng, 2, min(40, count - 1))
            result = count - change
        question.append(f"{name} {verb} {change}.")
        solution.append(f"{name} {verb} {change}, so {count}{sign}{change}={result}.")
        count = result
    question.append(f"How many {item} now?")
    return Problem(" ".join(question), " ".join(solution) + f"\n#### {count}", count, operations)


# Only random() itself is promised to give the same numbers on every Python, so all draws are made of it.


def _choose(rng: random.Random, options: Sequence[T]) -> T:
    return options[_between(rng, 0, len(options) - 1)]


def _between(rng: random.Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))
