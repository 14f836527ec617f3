"""Accuracy: the same questions to every configuration, kept item by item so that pairs can be made.

A request that fails voids the run: an error is no wrong answer. So do more than `MOST_TRUNCATED` of the
answers cut off by the token limit, wherever a run is compared. Each item ends in one state:

    answered      an answer was read from it, right or wrong
    truncated     cut off by the token limit
    unparsed      ended by itself, and no answer in it
    degenerate    the same few characters over and over
    error         no text at all; a run that holds one has no accuracy

What is read from a file is checked first: each field's kind, that the fields agree with one another, and that
no question is there twice, since all of it would pass for evidence.

Not covered: what the questions are, and how an answer is read; a workload or `gsm8k.protocols` says that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from dspark_deploy.errors import InputError, MeasurementError
from dspark_deploy.launch.rundir import write_atomically
from dspark_deploy.plain_json import json_lines, parse_json
from dspark_deploy.validation import fault_lines
from tuning.endpoint import Answer, Endpoint, RequestFailed, Sampling
from tuning.per_request import RequestSteps, from_histogram
from tuning.workload import Question

STATES = ("answered", "truncated", "unparsed", "degenerate", "error")
MOST_TRUNCATED = 0.01
Count = Annotated[int, Field(ge=0, le=2**31)]
"""Tokens or steps of one answer; a larger number in a file is damage."""
# Eight times the same up to 64 characters at the end, and 64 characters of it at least.
LOOP = re.compile(r"(.{1,64}?)\1{7,}\s*\Z", re.DOTALL)
LOOP_TAIL, LOOP_LEAST = 1024, 64


class AccuracyVoidError(MeasurementError):
    """The run has no accuracy: a request failed, or the server answered with something else."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question and what became of it. `strict` and `flexible` are the answers by the two readings."""

    id: str
    gold: str
    answer: str | None
    correct: bool
    state: str
    text: str
    finish_reason: str = ""
    strict: str | None = None
    flexible: str | None = None
    reasoning: str = ""
    tokens: Count | None = None
    histogram: list[Count] | None = None

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended it, looping or not."""
        return self.finish_reason == "length"


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

    @property
    def steps(self) -> list[RequestSteps]:
        """Each request's steps, as far as the engine told them."""
        return [from_histogram(item.histogram, item.tokens) for item in self.items if item.histogram]

    def void_reasons(self, limit: int | None = None) -> list[str]:
        """Why these answers give no accuracy; empty where they do. `limit`: the token limit, where known."""
        reasons, cut = [], sum(item.truncated for item in self.items)
        if errors := sum(item.state == "error" for item in self.items):
            reasons.append(f"{errors} requests failed")
        if cut > MOST_TRUNCATED * len(self.items):
            where = "by the token limit" if limit is None else f"at {limit} tokens"
            reasons.append(
                f"{cut} of {len(self.items)} answers were cut off {where}, over {MOST_TRUNCATED:.0%}: is it "
                f"or max-model-len too small, or do answers loop?"
            )
        return reasons

    def counts(self) -> dict[str, int]:
        """Questions, right answers, and the states that are no answer."""
        counted = {state: sum(item.state == state for item in self.items) for state in STATES[1:]}
        return {"questions": len(self.items), "correct": sum(self.correct), **counted}

    def identical_to(self, other: AccuracyRun) -> int:
        """How many answers are the same text. No gate: greedy text may differ between batch shapes."""
        return sum(a.text == b.text for a, b in zip(self.items, other.items, strict=True))

    def write(self, path: Path) -> None:
        """One JSON line per item."""
        write_atomically(path, "".join(json.dumps(asdict(item)) + "\n" for item in self.items))

    @classmethod
    def read(cls, path: Path) -> AccuracyRun:
        """What `write` wrote. Raises InputError naming the first line that isn't a sound item."""
        return cls(
            items_of(
                path,
                lambda _, line: read_item(line),
                no_file="is no file of answered questions: ",
                no_item="is no answered question: ",
                no_lines="holds no answered question",
            )
        )


def items_of(
    path: Path, read: Callable[[int, str], Item], *, no_file: str, no_item: str, no_lines: str
) -> list[Item]:
    """The items of a file of JSON lines, by `read(number, line)`, no id twice.

    Raises InputError for an unreadable or empty file, and for the first line at which `read` raises
    ValueError; the three texts are what is said of the path.
    """
    try:
        lines = json_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {no_file}{error}") from error
    items: dict[str, Item] = {}
    for number, line in lines:
        try:
            item = read(number, line)
            refuse_second(item.id, items)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {no_item}{error}") from error
        items[item.id] = item
    if not items:
        raise InputError(f"{path}: {no_lines}")
    return list(items.values())


_ITEMS = TypeAdapter(Item)


def read_item(line: str) -> Item:
    """One line of a file of items. Raises ValueError for a field of another kind, and where two disagree."""
    document = parse_json(line)
    if not isinstance(document, dict):
        raise ValueError("a line is one JSON object")
    if "completion" in document:
        raise ValueError(
            "it is a completion that isn't scored; write items with dspark-tune gsm8k score FILE --out "
            "FOLDER, and name that folder"
        )
    if unknown := document.keys() - {field.name for field in fields(Item)}:
        raise ValueError(f"unknown field {min(unknown)!r}")
    try:
        item = _ITEMS.validate_json(line, strict=True)
    except ValidationError as error:
        raise ValueError("; ".join(fault_lines(error))) from None
    if fault := _contradiction(item):
        raise ValueError(fault)
    return item


def refuse_second(name: str, known: Collection[str]) -> None:
    """Raise ValueError where a question is in a run already."""
    if name in known:
        raise ValueError(f"question {name!r} is there already, and counted twice it is no independent one")


def _contradiction(item: Item) -> str | None:
    """What of an item can't be true together, in one sentence."""
    right = item.answer is not None and item.answer == item.gold
    faults = {
        f"state {item.state!r} is none of {', '.join(STATES)}": item.state not in STATES,
        f"correct is {item.correct}, with answer {item.answer!r} and gold {item.gold!r}": item.correct
        != right,
        "it is answered, without an answer": item.state == "answered" and item.answer is None,
        f"it is {item.state}, with an answer": item.state in ("unparsed", "error")
        and item.answer is not None,
        "it is truncated, and finish_reason isn't length": item.state == "truncated" and not item.truncated,
        f"finish_reason is length, and the state {item.state}": item.truncated
        and item.state not in ("truncated", "degenerate"),
    }
    return next((fault for fault, found in faults.items() if found), None)


def state_of(text: str, finish_reason: str, answer: str | None) -> str:
    """The one state of an answer that came."""
    tail = text[-LOOP_TAIL:]
    loop = LOOP.search(tail)
    if loop and len(loop[0].strip()) >= LOOP_LEAST:
        return "degenerate"
    if finish_reason == "length":
        return "truncated"
    return "unparsed" if answer is None else "answered"


def greedy(
    endpoint: Endpoint, max_tokens: int, answer_of: Callable[[str], str | None]
) -> Callable[[Question], Item]:
    """Asks one question by a greedy completion; an answer that was cut off has no answer in it."""

    def ask(question: Question) -> Item:
        answer = endpoint.complete(question.prompt, Sampling(max_tokens))
        found = None if answer.finish_reason == "length" else answer_of(answer.text)
        state = state_of(answer.text, answer.finish_reason, found)
        return item_of(question, answer, found, state, found == question.gold)

    return ask


def item_of(question: Question, answer: Answer, found: str | None, state: str, correct: bool) -> Item:
    """The item of a question that has one reading of its answer."""
    return Item(
        id=question.id,
        gold=question.gold,
        answer=found,
        correct=correct,
        state=state,
        text=answer.text,
        finish_reason=answer.finish_reason,
        strict=found,
        flexible=found,
        reasoning=answer.reasoning,
        tokens=answer.completion_tokens,
        histogram=list(answer.histogram) or None,
    )


def run_accuracy(
    questions: Sequence[Question],
    ask: Callable[[Question], Item],
    *,
    concurrency: int,
    done: Collection[Item] = (),
    on_item: Callable[[Item], Any] = lambda item: None,
) -> AccuracyRun:
    """Ask every question that isn't in `done`; `on_item` gets each as it comes, in this thread.

    Raises AccuracyVoidError at the first request that fails; what came before has been handed over.
    """
    known = {item.id: item for item in done}
    owed = [question for question in questions if question.id not in known]
    with ThreadPoolExecutor(concurrency) as pool:
        running = {pool.submit(ask, question) for question in owed}
        try:
            while running:
                wait(running, return_when=FIRST_COMPLETED)
                # Asked one by one, since `wait` may name a later one and miss an earlier; and those that went
                # well first, since a failure among them must not lose their answers.
                ended = {future for future in running if future.done()}
                running -= ended
                for future in sorted(ended, key=lambda one: one.exception() is not None):
                    item = future.result()
                    known[item.id] = item
                    on_item(item)
        except RequestFailed as error:
            raise AccuracyVoidError(f"a request failed, and an error is no wrong answer: {error}") from error
        finally:
            for future in running:
                future.cancel()
    return AccuracyRun([known[question.id] for question in questions])
