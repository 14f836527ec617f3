"""Answers in a file, read anew: items of ours, or completions that something else has collected.

    {"id": "q1", "completion": "So it is\n#### 72", "gold": "72", "finish_reason": "stop"}

`text` may stand for `completion`, `id` may be missing; `reasoning`, `tokens` and `histogram` are taken where
they are there, and anything else is left alone. A line without finish_reason is refused: whether an answer
was cut off decides whether it counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from dspark_deploy.plain_json import parse_json
from dspark_deploy.validation import fault_lines
from tuning.accuracy import Count, Item, items_of
from tuning.endpoint import Answer
from tuning.gsm8k.extraction import NUMBER
from tuning.gsm8k.protocols import Protocol, find_protocol
from tuning.workload import Question

NEEDED = "a line needs gold, finish_reason, and text or completion"


def _number(value: str | int | float) -> str:
    if isinstance(value, bool) or not NUMBER.fullmatch(text := str(value).strip()):
        raise ValueError(f"{str(value)[:20]!r} is no number; write it as 72")
    return text


class Completion(BaseModel):
    """One line. Strict: a number where a text belongs is a damaged file."""

    model_config = ConfigDict(strict=True)

    text: str = Field(validation_alias=AliasChoices("text", "completion"))
    gold: Annotated[str | int | float, AfterValidator(_number)]
    finish_reason: str = Field(min_length=1)
    id: str | int | None = None
    reasoning: str | None = None
    tokens: Count | None = None
    histogram: list[Count] | None = None


def rescore(document: Any, protocol: Protocol, number: int) -> Item:
    """One line, scored anew. Raises ValueError, with what the line would need."""
    if not isinstance(document, dict):
        raise ValueError("a line is one JSON object")
    try:
        line = Completion.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"{NEEDED} ({'; '.join(fault_lines(error))})") from None
    name = f"line-{number}" if line.id is None else str(line.id)
    right = protocol.reading(str(line.gold))
    if right is None:
        raise ValueError(f"gold {line.gold!r} is no number to protocol {protocol.name}")
    answer = Answer(
        line.text,
        line.reasoning or "",
        line.finish_reason,
        line.tokens,
        histogram=tuple(line.histogram or ()),
    )
    return protocol.score(Question(name, "", right), answer)


def read_completions(file: Path, protocol: str) -> list[Item]:
    """The lines of a file, scored. Raises InputError naming the first line that can't be."""
    chosen = find_protocol(protocol)
    return items_of(
        file,
        lambda number, line: rescore(parse_json(line), chosen, number),
        no_file="can't be read: ",
        no_item="",
        no_lines="is empty",
    )
