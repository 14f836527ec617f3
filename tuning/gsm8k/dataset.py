"""GSM8K's questions and shots, from a folder or from the hub, and whether they are the ones that are pinned.

A folder holds `test.jsonl` and a file `train*.jsonl` with the training set's beginning, one JSON object with
`question` and `answer` a line. `hub` takes `openai/gsm8k` by the `datasets` library, where it is installed.
`tiny` is no GSM8K: the built-in checkpoint's own problems, in the same form.

The data are MIT-licensed and not part of this package. Other data can be used, and are called so everywhere:
a figure from them compares with no published one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_deploy.errors import InputError
from dspark_deploy.plain_json import json_lines, parse_json
from dspark_deploy.tiny import language
from tuning.gsm8k.extraction import gold

SHOTS = 8
HUB, HUB_NAME = "hub", "openai/gsm8k"
TINY, TINY_QUESTIONS = "tiny", 200
# sha256 over the rows as `digest` writes them: the first 8 training items, and all 1,319 test items.
SHOTS_SHA256 = "42b2980d84f821c250cd65c9085ee3345b92f7e54faf193a5ab4829a1c8364b6"
TEST_SHA256 = "32c548f08195e19e33408b844dd7be6aa4bcae457d957bc05909ff4bd4a00595"


@dataclass(frozen=True, slots=True)
class Row:
    """One problem with its solution, as the data has it."""

    question: str
    answer: str

    @property
    def gold(self) -> str:
        """The right number."""
        return gold(self.answer)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Shots and questions. `pinned` says that both are GSM8K's own."""

    shots: list[Row]
    test: list[Row]

    @property
    def shots_sha256(self) -> str:
        """Hash of the shots."""
        return digest(self.shots)

    @property
    def test_sha256(self) -> str:
        """Hash of all questions."""
        return digest(self.test)

    @property
    def pinned(self) -> bool:
        """Whether these are the shots and the questions that published figures are about."""
        return (self.shots_sha256, self.test_sha256) == (SHOTS_SHA256, TEST_SHA256)


def digest(rows: Sequence[Row]) -> str:
    """sha256 of rows, independent of how a file spells its JSON."""
    lines = (
        json.dumps(
            {"answer": row.answer, "question": row.question}, separators=(",", ":"), ensure_ascii=False
        )
        for row in rows
    )
    return hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


def load_gsm8k(source: str, allow_other: bool = False) -> Dataset:
    """Read the data. Raises InputError where it isn't there, damaged, or not the pinned one.

    The built-in checkpoint's problems are asked for by name, so they need no `allow_other`.
    """
    if source == TINY:
        return _tiny()
    data = _from_hub() if source == HUB else _from_folder(Path(source))
    if not data.pinned and not allow_other:
        named = "shots" if data.shots_sha256 != SHOTS_SHA256 else "questions"
        raise InputError(
            f"{source}: the {named} are not GSM8K's (by their hash), so a figure would compare with nothing; "
            f"get the original files, or say --allow-other-data"
        )
    return data


def _tiny() -> Dataset:
    drawn = language.problems(language.ACCURACY_SEEDS[0], TINY_QUESTIONS)
    return Dataset([], [Row(problem.question, problem.solution) for problem in drawn])


def _from_folder(folder: Path) -> Dataset:
    trains = sorted(folder.glob("train*.jsonl")) if folder.is_dir() else []
    if not trains or not (folder / "test.jsonl").is_file():
        raise InputError(
            f"{folder}: needs test.jsonl and train*.jsonl of GSM8K; name their folder with --data, "
            f"or use --data {HUB}"
        )
    return Dataset(_rows(trains[0])[:SHOTS], _rows(folder / "test.jsonl"))


def _rows(path: Path) -> list[Row]:
    found: list[Row] = []
    try:
        lines = json_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read: {error}") from error
    for number, line in lines:
        try:
            found.append(_row(parse_json(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}:{number}: is no GSM8K row: it needs question, and answer with #### and a number"
            ) from error
    if not found:
        raise InputError(f"{path}: is empty")
    return found


def _row(document: Any) -> Row:
    row = Row(document["question"], document["answer"])
    gold(row.answer)
    return row


def _from_hub() -> Dataset:
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"--data {HUB} needs the library datasets: pip install datasets, or name a folder")
    import datasets  # type: ignore[import-not-found,unused-ignore]

    try:
        train = datasets.load_dataset(HUB_NAME, "main", split=f"train[:{SHOTS}]")
        test = datasets.load_dataset(HUB_NAME, "main", split="test")
    except (OSError, ValueError) as error:  # the hub's own errors are one of these
        raise InputError(
            f"{HUB_NAME}: can't be had from the hub: {error}; name a folder with --data"
        ) from error
    return Dataset([_row(row) for row in train], [_row(row) for row in test])
