"""`dspark-tune divergence`: how far greedy answers of two builds drift apart. See `judging.divergence`.

    dspark-tune divergence --url http://a:8000 --data prompts.jsonl --out a.json
    dspark-tune divergence --profile mi355x.yaml --data prompts.jsonl --out b.json
    dspark-tune divergence a.json b.json

`--data` is a JSONL file of prompts, or GSM8K's folder; without it the built-in checkpoint's own language.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dspark_deploy.console import people
from dspark_deploy.errors import InputError
from dspark_deploy.launch.rundir import refuse_unwritable
from dspark_deploy.profile.schema import MOST_REQUESTS, MOST_SEQUENCES
from tuning.commands.common import Json, Machine, Model, ProfileOption, Sets, Url, an_endpoint, conclude
from tuning.judging.divergence import KIND, PROMPTS, TOKENS, across, collect, read_beginnings, within
from tuning.record import Record, Workload, now, text_sha256
from tuning.workload import FromFile, TinyArithmetic, find_workload


def divergence(
    files: Annotated[list[Path] | None, typer.Argument(help="Two files of this command, to compare")] = None,
    url: Url = None,
    model: Model = None,
    machine: Machine = None,
    profile: ProfileOption = None,
    sets: Sets = None,
    data: Annotated[Path | None, typer.Option(help="Prompts: JSONL, or GSM8K's folder")] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts", min=1, max=MOST_REQUESTS)] = PROMPTS,
    concurrency: Annotated[int, typer.Option(help="Requests in flight", min=1, max=MOST_SEQUENCES)] = 8,
    out: Annotated[Path | None, typer.Option(help="Write the record here")] = None,
    as_json: Json = False,
) -> None:
    """Collect the first greedy tokens of an engine, twice; or compare two such files."""
    console = people(as_json)
    if files:
        if len(files) != 2 or url or profile:
            raise InputError("name two files to compare, or one engine to collect from")
        first, second = (read_beginnings(path) for path in files)
        result = {"files": [str(path) for path in files], **across(first, second)}
        for name, found in (("first", result["within"][0]), ("second", result["within"][1])):
            _show(console, f"{name} build against itself", found)
        _show(console, "first against second", result["across"])
        conclude(console, Record(kind="divergence", created=now(), engine=None, result=result), out, as_json)
        return
    if out is not None:
        refuse_unwritable(out)
    asked = _prompts(data, prompts)
    with an_endpoint(console, url, model, profile, sets, machine) as (endpoint, engine):
        passes = collect(endpoint, asked, concurrency, console.print)
    result = {"prompts_sha256": text_sha256(asked), "passes": passes}
    result["within"] = within(result)
    _show(console, "the build against itself", result["within"])
    workload = Workload(
        name=str(data or TinyArithmetic.name),
        sha256=result["prompts_sha256"],
        template="none: raw prompt",
        sampling={"temperature": 0.0, "max_tokens": TOKENS},
    )
    conclude(
        console,
        Record(kind=KIND, created=now(), engine=engine, workload=workload, result=result),
        out,
        as_json,
    )


def _prompts(data: Path | None, count: int) -> list[str]:
    """Disjoint from every load's prompts, where they are the built-in language's."""
    if data is None:
        return [question.prompt for question in TinyArithmetic().questions(count)]
    if data.is_dir():
        from tuning.gsm8k.dataset import load_gsm8k
        from tuning.gsm8k.protocols import find_protocol

        gsm8k = load_gsm8k(str(data), allow_other=True)
        return [question.prompt for question in find_protocol("strict-8shot").questions(gsm8k, count)]
    workload = find_workload("jsonl", data)
    assert isinstance(workload, FromFile)
    if len(workload.prompts) < count:
        raise InputError(f"{data}: has {len(workload.prompts)} prompts; ask for fewer with --prompts")
    return workload.prompts[:count]


def _show(console: Console, name: str, found: dict[str, Any]) -> None:
    interval, delta = found["interval"], found["median_logprob_delta"]
    console.print(
        f"{name}: {found['differing']} of {found['prompts']} prompts differ, {found['share']:.1%} "
        f"({interval['low']:.1%} to {interval['high']:.1%})"
        + ("" if delta is None else f"; median log probability delta {delta:.2g}"),
        markup=False,
    )
