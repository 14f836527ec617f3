"""What the numerics gate of an engine's processes said: the refusal, and the table that people read.

    dspark-serve --profile mi355x.yaml --selftest

The gate itself runs in the workers (`dspark_deploy.plugin.gate`); this reads the sections `numerics` that
they left in their reports.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from dspark_deploy.errors import NumericsRefused
from dspark_deploy.kernels.causes import wrong_operators

SECTION = "numerics"
SHOWN = 8  # sentences of a refusal; of many workers, each has its own


def sections(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gate's section of each process that ran it."""
    return [report[SECTION] for report in reports if SECTION in report]


def complete(found: list[dict[str, Any]]) -> bool:
    """Whether every worker of this machine has said its part."""
    return bool(found) and len(found) >= found[0]["workers"]


def state(found: list[dict[str, Any]]) -> str:
    """The worst state among the workers."""
    states = {section["state"] for section in found}
    return next((each for each in ("wrong", "passed") if each in states), "not applicable")


def refusal(found: list[dict[str, Any]]) -> NumericsRefused | None:
    """The error of exit code 4, or None where no operator is wrong."""
    if state(found) != "wrong":
        return None
    lines = [
        f"{_worker(section)}{sentence}" for section in found for sentence in wrong_operators(section["rows"])
    ]
    more = [f"and {len(lines) - SHOWN} more, in the report"] if len(lines) > SHOWN else []
    return NumericsRefused(
        "the numerics gate refused: an mHC operator of this engine is wrong on this device\n"
        + "\n".join(f"  {line}" for line in [*lines[:SHOWN], *more])
        + "\n  take another mhc.provider, or set mhc.gate: warn to serve anyway",
        found,
    )


def _worker(section: dict[str, Any]) -> str:
    """Which worker it was, where there are several."""
    return f"worker {section['rank']} (process {section['pid']}): " if section["workers"] > 1 else ""


def worst(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per operator, variant and output: its worst over places, token counts and workers."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for section in found:
        for row in section["rows"]:
            key = (row["operator"], row["variant"], row["output"])
            if key not in rows or _badness(row) > _badness(rows[key]):
                rows[key] = row
    return list(rows.values())


def _badness(row: dict[str, Any]) -> tuple[bool, bool, float]:
    """Wrong before right, NaN before the rest; of wrong rows the one of most tokens: its ratio is quiet."""
    wrong = bool(row["cause"])
    return wrong, row["nans"] > 0, row["tokens"] if wrong else row["nrmse"]


def show(console: Console, found: list[dict[str, Any]]) -> None:
    """Print the gate's verdict, with one line per operator and output where there are any."""
    verdict = state(found)
    reasons = ", ".join(dict.fromkeys(section["reason"] for section in found if section["reason"]))
    if verdict == "not applicable":
        console.print(f"numerics gate: not applicable: {reasons}", markup=False)
        return
    table = Table(title="numerics gate, worst over token counts", title_justify="left")
    for column in ("operator", "by", "variant", "output", "tokens", "ratio", "NRMSE", "NaN", "us", "verdict"):
        table.add_column(column, overflow="fold")
    for row in worst(found):
        measured = (row[name] for name in ("tokens", "ratio", "nrmse", "nans", "microseconds"))
        numbers = ["" if number is None else str(number) for number in measured]
        verdict_of_row = row["cause"] or "right"
        table.add_row(row["operator"], row["route"], row["variant"], row["output"], *numbers, verdict_of_row)
    console.print(table)
    seconds = max(section["seconds"] for section in found)
    devices = ", ".join(dict.fromkeys(section["device"] for section in found))
    checked = sum(section["operators"] for section in found)
    console.print(
        f"numerics gate: {verdict}, {checked} operators in {len(found)} workers on {devices}, {seconds} s",
        markup=False,
    )
    for name in sorted({name for section in found for name in section["unchecked"]}):
        console.print(f"numerics gate: {name} has no reference here and was not checked", markup=False)
