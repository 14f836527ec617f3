"""`dspark-tune compare` and `accuracy-gate`: is the second run as good as the first, and could one tell?

    dspark-tune compare runs/gsm8k-none runs/gsm8k-k5 --margin 0.01
    dspark-tune compare runs/measure-a runs/measure-b --arm fixed       speed as well, after accuracy
    dspark-tune accuracy-gate runs/gsm8k-none runs/gsm8k-k5 --null runs/none-1 --null runs/none-2

A run is a file of items (`items.jsonl`, `accuracy.jsonl`), the folder of a GSM8K run, or a folder of
`measure` with an arm. `compare` ends with exit code 7 on fail. `accuracy-gate` opens on proof only:
inconclusive is 7, too. No gain in speed outweighs a failed comparison: the verdict is accuracy's.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dspark_deploy.console import people
from dspark_deploy.errors import GateFailed, InputError
from tuning.accuracy import AccuracyRun
from tuning.arms import FIXED
from tuning.commands.common import LEAST_MARGIN, MOST_MARGIN, Json, conclude, finite
from tuning.judging.comparison import FAIL, INCONCLUSIVE, PASS, compare, nothing_to_lose
from tuning.record import Record, now
from tuning.statistics import paired_mean_difference

Run = Annotated[Path, typer.Argument(help="items.jsonl, or a folder of gsm8k run or measure")]
Margin = Annotated[
    float,
    typer.Option(
        help="Largest loss that is accepted, as 0.01", min=LEAST_MARGIN, max=MOST_MARGIN, callback=finite
    ),
]
Null = Annotated[list[Path] | None, typer.Option("--null", help="Two runs of one build: give it twice")]
ArmOption = Annotated[str, typer.Option("--arm", help="Which arm of a folder of measure")]
Out = Annotated[Path | None, typer.Option(help="Write the record here")]


def compare_command(
    before: Run,
    after: Run,
    margin: Margin = 0.01,
    null: Null = None,
    arm: ArmOption = FIXED,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare two runs over the same questions, and their speed where both were measured."""
    _compare(before, after, margin, null, arm, out, as_json, gate=False)


def accuracy_gate(
    before: Run,
    after: Run,
    margin: Margin = 0.01,
    null: Null = None,
    arm: ArmOption = FIXED,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """As compare, and exit code 7 unless the second run is shown to lose no more than the margin."""
    _compare(before, after, margin, null, arm, out, as_json, gate=True)


def _compare(
    before: Path,
    after: Path,
    margin: float,
    null: list[Path] | None,
    arm: str,
    out: Path | None,
    as_json: bool,
    gate: bool,
) -> None:
    console = people(as_json)
    if null and len(null) != 2:
        raise InputError("--null wants two runs of one build: give it twice, or not at all")
    pair = (read_run(null[0], arm), read_run(null[1], arm)) if null else None
    result = compare(read_run(before, arm), read_run(after, arm), margin, pair)
    result = {"before": str(before), "after": str(after), **result, "speed": speed(before, after, arm)}
    show(console, result)
    record = Record(kind="compare", created=now(), engine=None, result=result)
    verdict = result["verdict"]
    if verdict == FAIL or (gate and verdict != PASS):
        if out is not None:
            record.write(out)
        raise GateFailed(f"accuracy gate: {verdict}: {_why(result)}", record.as_json())
    conclude(console, record, out, as_json)


def _why(result: dict[str, Any]) -> str:
    if result["verdict"] == FAIL:
        return "accuracy was lost, beyond the margin and beyond chance"
    right, margin = result["accuracy"]["before"], result["margin"]
    if nothing_to_lose(right, margin):
        return (
            f"the first run has {right:.2%} right, so there is nothing to lose beyond a margin of "
            f"{margin:.2%}; is it the right protocol, and does the reference work?"
        )
    return "these runs can't show that the loss is within the margin; ask more questions"


def _items(path: Path, arm: str) -> Path:
    if not path.is_dir():
        return path
    places = (path / "items.jsonl", path / "arms" / f"{arm}-1" / "accuracy.jsonl", path / "accuracy.jsonl")
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise InputError(
            f"{path}: has neither items.jsonl nor arms/{arm}-1/accuracy.jsonl; is the run whole?"
        )
    return found


def read_run(path: Path, arm: str) -> AccuracyRun:
    """The items of a run. Raises InputError, also for a void one."""
    record = path / "record.json" if path.is_dir() else path.with_name("record.json")
    if record.is_file():
        stored = Record.read(record)
        if stored.kind == "gsm8k" and stored.result["void"]:
            raise InputError(f"{path}: the run is void: {'; '.join(stored.result['void'])}")
    items = _items(path, arm)
    run = AccuracyRun.read(items)
    if reasons := run.void_reasons():
        raise InputError(f"{items}: has no accuracy, so it can't be compared: {'; '.join(reasons)}")
    return run


def speed(before: Path, after: Path, arm: str) -> list[dict[str, Any]] | None:
    """TPOT of two folders of measure over the same prompts, level by level; None where they have none."""
    tables = [_tpots(folder, arm) for folder in (before, after)]
    if not all(tables):
        return None
    rows = []
    for level in tables[0].keys() & tables[1].keys():
        first, second = tables[0][level], tables[1][level]
        pairs = [(a, b) for a, b in zip(first, second, strict=False) if a is not None and b is not None]
        if len(first) != len(second) or not pairs:
            continue
        difference = paired_mean_difference([b for _, b in pairs], [a for a, _ in pairs])
        mean = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
        rows.append(
            {
                "level": level,
                "tpot_ms_before": mean[0],
                "tpot_ms_after": mean[1],
                "difference_ms_interval": asdict(difference),
            }
        )
    return sorted(rows, key=lambda row: str(row["level"]))


def _tpots(folder: Path, arm: str) -> dict[str, list[float | None]]:
    path = folder / "record.json"
    if not folder.is_dir() or not path.is_file():
        return {}
    record = Record.read(path)
    arms = record.result["arms"] if record.kind == "measure" else []
    return {
        load["level"]: load["tpot_ms_by_request"]
        for one in arms
        if one["arm"] == arm and one["state"] == "complete"
        for load in one["loads"]
        if load["valid"] and load["boot"] == 1
    }


def show(console: Console, result: dict[str, Any]) -> None:
    """The comparison in a few lines."""
    found = result["comparison"]
    console.print(
        f"accuracy {result['accuracy']['before']:.2%} before, {result['accuracy']['after']:.2%} after: "
        f"{found['gained']} gained, {found['lost']} lost of {found['questions']}, exact McNemar "
        f"p = {found['p_value']:.3g}",
        markup=False,
    )
    console.print(
        f"difference {found['difference']:+.2%} ({found['interval']['low']:+.2%} to "
        f"{found['interval']['high']:+.2%}), margin {result['margin']:.2%}",
        markup=False,
    )
    if result["null"]:
        null = result["null"]
        console.print(
            f"null: the same build twice gained {null['gained']} and lost {null['lost']}; "
            f"{null['identical_answers']} answers were identical",
            markup=False,
        )
    power = result["power"]
    seen, smallest = power["loss_seen_8_of_10"], power["smallest_significant_loss"]
    console.print(
        f"at {power['discordant']} discordant pairs: "
        + ("no loss would be significant" if smallest is None else f"{smallest:.2%} lost is significant")
        + ("" if seen is None else f", a loss of {seen:.2%} is seen 8 times of 10")
        + f"; an equal build passes with probability {power['equal_pair_passes']:.2f}",
        markup=False,
    )
    for row in result["speed"] or []:
        interval = row["difference_ms_interval"]
        console.print(
            f"TPOT, {row['level']}: {row['tpot_ms_before']:.2f} ms before, {row['tpot_ms_after']:.2f} after "
            f"({interval['low']:+.2f} to {interval['high']:+.2f})",
            markup=False,
        )
    reason = f": {_why(result)}" if result["verdict"] == INCONCLUSIVE else ""
    console.print(f"verdict: {result['verdict']}{reason}", markup=False)
