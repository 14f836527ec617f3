"""`dspark-tune acceptance`: acceptance from counters, and what is wrong with it, by name.

    dspark-tune acceptance --before before.prom --after after.prom
    dspark-tune acceptance --url http://localhost:8000 --seconds 60      the traffic that is there anyway
    dspark-tune acceptance --log engine.log

Exit code 7 where a verdict is against it. Not covered: sending the traffic; `measure` and `gsm8k run` do.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_deploy.console import people
from dspark_deploy.errors import GateFailed, InputError, MeasurementError
from dspark_deploy.launch.rundir import refuse_unwritable
from tuning.acceptance import (
    MOST_POSITIONS,
    Acceptance,
    MetricsError,
    Scrape,
    acceptance_between,
    difference,
    engines,
    parse_metrics,
    past_end_share,
)
from tuning.acceptance_log import read_log
from tuning.commands.common import Json, Machine, Model, Url, conclude, finite
from tuning.endpoint import Endpoint
from tuning.record import Engine as EngineOfRecord
from tuning.record import Record, foreign_engine, now
from tuning.verdicts import FEW_DRAFTS, judge_acceptance

MOST_SECONDS = 7 * 24 * 3600


def acceptance(
    before: Annotated[Path | None, typer.Option(help="Metrics page before")] = None,
    after: Annotated[Path | None, typer.Option(help="Metrics page after")] = None,
    log: Annotated[Path | None, typer.Option(help="vLLM's log, in place of metrics")] = None,
    url: Url = None,
    model: Model = None,
    machine: Machine = None,
    seconds: Annotated[
        float,
        typer.Option(help="With --url: time between the scrapes", min=0, max=MOST_SECONDS, callback=finite),
    ] = 60,
    block: Annotated[
        int | None, typer.Option(help="The draft's trained width", min=1, max=MOST_POSITIONS)
    ] = None,
    expect: Annotated[str | None, typer.Option(help="Expected acceptance length, as 3.4,3.7")] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="k isn't fixed: judge the length only")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the record here")] = None,
    as_json: Json = False,
) -> None:
    """Say what two metrics scrapes, or a log, tell of acceptance, and what is wrong with it."""
    console = people(as_json)
    expected = _range(expect)
    sources = [before is not None or after is not None, log is not None, url is not None]
    if sum(sources) != 1 or (before is None) != (after is None):
        raise InputError("name one source: --before A with --after B, or --log FILE, or --url URL")
    if machine is not None and url is None:
        raise InputError("--machine says what the server at --url runs on; files have no server")
    if out is not None:
        refuse_unwritable(out)
    engine: EngineOfRecord | None = None
    extra: dict[str, Any] = {}
    if log is not None:
        found = read_log(log)
    else:
        if before is not None and after is not None:
            pages = _page(before), _page(after)
        else:
            pages, engine = _scrapes(console, str(url), model, seconds, machine)
        found = _between(pages, [str(path) for path in (before, after) if path is not None])
        extra = {
            "engines": engines(pages[1]),
            "past_end_share": past_end_share(difference(*pages)),
        }
    if not found.drafts:
        raise MeasurementError(
            "nothing was drafted in that time, so there is no acceptance: was there traffic, and does the "
            "engine speculate?"
        )
    verdicts = judge_acceptance(found.position_rates, block=block, expected=expected, fixed_k=not adaptive)
    result = _result(found, adaptive) | extra
    result["notes"] = _notes(found, block) if not adaptive else []
    result["verdicts"] = [
        {"name": one.name, "message": one.message, "remedy": one.remedy} for one in verdicts
    ]
    _show(console, result)
    record = Record(kind="acceptance", created=now(), engine=engine, result=result)
    if verdicts:
        if out is not None:
            record.write(out)
        lines = "\n".join(f"  {one.name}: {one.message}; {one.remedy}" for one in verdicts)
        raise GateFailed(f"acceptance is not as it should be\n{lines}", record.as_json())
    conclude(console, record, out, as_json)


def _result(found: Acceptance, adaptive: bool) -> dict[str, Any]:
    fixed = not adaptive
    return {
        "acceptance_length": found.length,
        "drafts": found.drafts,
        "draft_tokens": found.draft_tokens,
        "accepted": found.accepted,
        "per_position": found.position_rates if fixed else None,
        "conditional": found.conditional_rates if fixed else None,
        "draft_acceptance_rate": found.draft_acceptance_rate if fixed else None,
        "identity_gap": found.length - 1 - sum(found.position_rates),
        "few_drafts": found.drafts < FEW_DRAFTS,
    }


def _notes(found: Acceptance, block: int | None) -> list[str]:
    """What is not wrong, and yet no reader may miss."""
    k = len(found.per_position)
    if block is None or k <= block or not any(found.per_position[block:]):
        return []
    return [
        f"k = {k} lies past the trained block of {block}, and drafts past it are accepted all the same: is "
        f"--block the draft's own (dspark_block_size in its config.json)?"
    ]


def _show(console: Console, result: dict[str, Any]) -> None:
    console.print(
        f"acceptance length {result['acceptance_length']:.4f} over {result['drafts']} drafts"
        + (", which are few" if result["few_drafts"] else ""),
        markup=False,
    )
    if result["per_position"] is not None:
        table = Table(title="by position", title_justify="left")
        for column in ("position", "accepted", "given the one before"):
            table.add_column(column, justify="right")
        conditional = [*result["conditional"], *[None] * len(result["per_position"])]
        for j, (rate, chance) in enumerate(zip(result["per_position"], conditional, strict=False), 1):
            table.add_row(str(j), f"{rate:.3f}", "" if chance is None else f"{chance:.3f}")
        console.print(table)
        console.print(f"draft acceptance rate {result['draft_acceptance_rate']:.3f}", markup=False)
    for note in result["notes"]:
        console.print(note, style="yellow", markup=False)
    if result.get("past_end_share") is not None:
        console.print(
            f"of the accepted tokens {result['past_end_share']:.1%} lay past an answer's end", markup=False
        )


def _page(path: Path) -> Scrape:
    try:
        return parse_metrics(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: can't be read: {error}; save it anew: curl URL/metrics > {path}"
        ) from error
    except MetricsError as error:
        raise InputError(f"{path}: {error}; save it anew: curl URL/metrics > {path}") from error


def _between(pages: tuple[Scrape, Scrape], files: list[str]) -> Acceptance:
    try:
        return acceptance_between(*pages)
    except MetricsError as error:
        if not files:
            raise
        raise MetricsError(f"{' and '.join(files)}: {error}") from error


def _scrapes(
    console: Console, url: str, model: str | None, seconds: float, machine: str | None
) -> tuple[tuple[Scrape, Scrape], EngineOfRecord]:
    with Endpoint.find(url, model) as endpoint:
        told = foreign_engine(endpoint.url, endpoint.describe(), machine)
        console.print(f"{told.build} at {told.url}: {told.hardware}", markup=False)
        first = endpoint.scrape()
        console.print(f"waiting {seconds:g} s for the traffic at {endpoint.url}", markup=False)
        time.sleep(seconds)
        return (first, endpoint.scrape()), told


def _range(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--expect {text}: write a range as 3.4,3.7") from None
    if not 1 <= low <= high < math.inf:
        raise InputError(f"--expect {text}: a range goes from the lower number to the higher, from 1 up")
    return low, high
