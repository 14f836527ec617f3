"""Greedy accuracy: the same questions to every configuration, kept item by item so that pairs can be made.

Temperature 0, the completions endpoint, a fixed concurrency. A request that fails voids the run: an error is
no wrong answer. Answers cut off by the token limit, and answers without a number, are counted apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from dspark_deploy.errors import MeasurementError
from dspark_deploy.launch.rundir import write_atomically
from tuning.workload import Question


class AccuracyVoidError(MeasurementError):
    """The run has no accuracy: a request failed, or the server answered with something else."""


@dataclass(frozen=True, slots=True)
class Item:
    """One answered question."""

    id: str
    gold: str
    answer: str | None
    correct: bool
    truncated: bool
    text: str


@dataclass(frozen=True, slots=True)
class AccuracyRun:
    """All questions, answered, in their order."""

    items: list[Item]

    @property
    def correct(self) -> list[bool]:
        """Right or wrong, in the questions' order."""
        return [item.correct for item in self.items]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return sum(self.correct) / len(self.items)

    def counts(self) -> dict[str, int]:
        """Right, cut off by the limit, without an answer."""
        return {
            "questions": len(self.items),
            "correct": sum(self.correct),
            "truncated": sum(item.truncated for item in self.items),
            "unparsed": sum(item.answer is None and not item.truncated for item in self.items),
        }

    def identical_to(self, other: AccuracyRun) -> int:
        """How many answers are the same text. No gate: greedy text may differ between batch shapes."""
        return sum(a.text == b.text for a, b in zip(self.items, other.items, strict=True))

    def write(self, path: Path) -> None:
        """One JSON line per item."""
        write_atomically(path, "".join(json.dumps(asdict(item)) + "\n" for item in self.items))

    @classmethod
    def read(cls, path: Path) -> AccuracyRun:
        """What `write` wrote."""
        return cls([Item(**json.loads(line)) for line in path.read_text().splitlines()])


def complete(client: httpx.Client, model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """One greedy completion: the first choice. Raises AccuracyVoidError."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    try:
        response = client.post("/v1/completions", json=body)
        response.raise_for_status()
        choice = response.json()["choices"][0]
    except (httpx.HTTPError, ValueError, TypeError, KeyError, IndexError) as error:
        raise AccuracyVoidError(f"a completion failed: {type(error).__name__}: {error}") from error
    if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
        raise AccuracyVoidError(f"the server's answer has no text: {str(choice)[:200]}")
    return choice


def run_accuracy(
    questions: Sequence[Question],
    answer_of: Callable[[str], str | None],
    *,
    client: httpx.Client,
    model: str,
    max_tokens: int,
    concurrency: int,
) -> AccuracyRun:
    """Ask every question once, greedily. Raises AccuracyVoidError."""

    def ask(question: Question) -> Item:
        choice = complete(client, model, question.prompt, max_tokens)
        text = choice["text"]
        truncated = choice.get("finish_reason") == "length"
        answer = None if truncated else answer_of(text)
        return Item(question.id, question.gold, answer, answer == question.gold, truncated, text)

    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(ask, question) for question in questions]
        try:
            return AccuracyRun([future.result() for future in futures])
        finally:
            for future in futures:
                future.cancel()
