"""What subcommands share: lists in flags, a checked profile, an endpoint, where a record goes."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark_deploy.console import print_json, show_findings
from dspark_deploy.errors import InputError, PreflightRefused
from dspark_deploy.launch.command import served_name
from dspark_deploy.launch.engine import Engine
from dspark_deploy.launch.rundir import new_run_directory
from dspark_deploy.preflight import Facts, Severity, check, probe
from dspark_deploy.profile import LoadedProfile, load_profile
from dspark_deploy.profile.loading import validated
from dspark_deploy.profile.schema import MOST_SEQUENCES
from tuning.endpoint import Endpoint
from tuning.record import Engine as EngineOfRecord
from tuning.record import Record, foreign_engine, own_engine

Json = Annotated[bool, typer.Option("--json", help="Last stdout line is one JSON document")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="path=value; may be repeated")]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="YAML file or shipped profile: boots an engine")
]
Url = Annotated[str | None, typer.Option("--url", help="An OpenAI endpoint that is up, as http://host:8000")]
Model = Annotated[str | None, typer.Option("--model", help="Model name there, where it serves several")]

Machine = Annotated[
    str | None,
    typer.Option(
        "--machine", help="With --url: what the server runs on, as 'CPU engine, 2 cores'; for the record"
    ),
]

PROGRESS_LINES = 10
LONGEST_NUMBER = 18  # digits; Python reads no more than 4300, and none of ours is longer
MOST_RATE = 1e6
LEAST_MARGIN, MOST_MARGIN = 0.0001, 0.5


def finite(value: float | None) -> float | None:
    """Callback of every option that is a float: click's ranges take nan, which is neither below nor above."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to measure with")
    return value


def words(text: str | None) -> list[str] | None:
    """`a,b` as a list; None stays None."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str | None, flag: str) -> list[int | str] | None:
    """`none,1,5` as numbers and the word none. Raises InputError."""
    found = words(text)
    if found is None:
        return None
    bad = [word for word in found if not (_is_number(word) or word == "none")]
    if bad or not found:
        raise InputError(f"{flag} {text}: {bad[0] if bad else 'nothing'!r} is no number; write it as 1,3,5")
    return [int(word) if word.isdecimal() else word for word in found]


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= LONGEST_NUMBER


def counts(text: str, flag: str, most: int = MOST_SEQUENCES) -> list[int]:
    """`1,8` as different numbers from 1 to `most`. Raises InputError."""
    found = [number for number in numbers(text, flag) or [] if isinstance(number, int)]
    if len(found) != len(words(text) or []) or not all(1 <= number <= most for number in found):
        raise InputError(f"{flag} {text}: wants numbers from 1 to {most}, as 1,8")
    if len(set(found)) < len(found):
        raise InputError(f"{flag} {text}: names a number twice")
    return found


def rates(text: str | None, flag: str) -> list[float]:
    """`2,0.5` as different numbers above 0, none where it is None. Raises InputError."""
    try:
        found = [float(word) for word in words(text) or []]
    except ValueError:
        found = [0.0]
    if not all(0 < rate <= MOST_RATE for rate in found) or (text is not None and not found):
        raise InputError(f"{flag} {text}: wants numbers above 0, up to {MOST_RATE:g}, as 2,8")
    if len(set(found)) < len(found):
        raise InputError(f"{flag} {text}: names a number twice")
    return found


def checked_profile(console: Console, profile: str, sets: list[str] | None) -> tuple[LoadedProfile, Facts]:
    """The profile on a free port, with this machine's facts. Raises InputError and PreflightRefused."""
    loaded = validated(load_profile(profile, sets or []), {"engine.port": 0})
    facts = probe(loaded.profile)
    findings = check(loaded, facts)
    show_findings(console, [finding for finding in findings if finding.severity is not Severity.NOTE])
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise PreflightRefused(
            "preflight refused this measurement; the findings above say why, and what to do",
            [finding.as_json() for finding in findings],
        )
    refuse_api_key(loaded)
    return loaded, facts


def refuse_api_key(loaded: LoadedProfile) -> None:
    """The load sends no key to an engine of ours, so one that wants a key would answer 401 after a boot."""
    engine = loaded.profile.engine
    if "api-key" in engine.args or "VLLM_API_KEY" in {**engine.env, **os.environ}:
        raise InputError(
            "the engine would ask for an API key (engine.args.api-key or VLLM_API_KEY), and dspark-tune "
            "sends none; leave it out for tuning, on a host that only this machine reaches"
        )


def require_libraries(needed: dict[str, str]) -> None:
    """Raise InputError naming every library that isn't installed, with why it is needed."""
    missing = [f"{name}: {why}" for name, why in needed.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError([f"missing library {line}" for line in missing])


@contextmanager
def an_endpoint(
    console: Console,
    url: str | None,
    model: str | None,
    profile: str | None,
    sets: list[str] | None,
    machine: str | None,
    prepare: Callable[[LoadedProfile, Facts], LoadedProfile] = lambda loaded, _: loaded,
) -> Iterator[tuple[Endpoint, EngineOfRecord]]:
    """The server at `url`, or one booted from `profile` for as long as the block lasts. Raises InputError."""
    if (url is None) == (profile is None):
        raise InputError("name one engine: --url of one that is up, or --profile to boot one")
    if url is not None:
        with Endpoint.find(url, model) as endpoint:
            told = foreign_engine(endpoint.url, endpoint.describe(), machine)
            console.print(f"{told.build} at {told.url}: {told.hardware}", markup=False)
            yield endpoint, told
        return
    if machine is not None:
        raise InputError(
            "--machine: an engine that is booted here runs on this machine, which is read; leave it out"
        )
    loaded, facts = checked_profile(console, str(profile), sets)
    loaded = prepare(loaded, facts)
    run = new_run_directory(Path("runs"), loaded.profile.name)
    console.print(f"booting the engine; run directory: {run.path}", markup=False)
    with Engine.start(loaded, facts, run, []) as engine:
        engine.wait_ready()
        with Endpoint(engine.url, served_name(loaded.profile)) as endpoint:
            yield endpoint, own_engine(loaded, facts)


@contextmanager
def item_progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, a line for every tenth elsewhere; the function given is called once an item."""
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    done = 0
    with bar:
        task = bar.add_task(what, total=total)

        def step() -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done)
            if (
                not console.is_terminal
                and done * PROGRESS_LINES // total > (done - 1) * PROGRESS_LINES // total
            ):
                console.print(f"{what}: {done} of {total}", markup=False)

        yield step


def conclude(console: Console, record: Record, out: Path | None, as_json: bool) -> dict[str, Any]:
    """Write the record where it is asked for, print it as JSON where that is; returns it as a document."""
    document = record.as_json()
    if out is not None:
        record.write(out)
        console.print(f"  {out}", markup=False)
    if as_json:
        print_json(document)
    return document
