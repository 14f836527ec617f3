"""`dspark-tune gsm8k run` and `gsm8k score`: accuracy by a named protocol, item by item.

    dspark-tune gsm8k run --data FOLDER --url http://localhost:8000 --protocol vllm-8shot --out runs/gsm8k-a
    dspark-tune gsm8k run --data FOLDER --profile mi355x.yaml --protocol strict-8shot --out runs/gsm8k-b
    dspark-tune gsm8k run --data tiny --profile cpu-tiny.yaml --protocol tiny-0shot        a run without a GPU
    dspark-tune gsm8k score runs/gsm8k-a/items.jsonl --protocol strict-8shot
    dspark-tune gsm8k score completions.jsonl --out runs/scored            a folder that compare takes

An interrupted run goes on when it is run again. A void run is a failed measurement: exit code 1. Not covered:
comparing two runs, which `compare` and `accuracy-gate` do.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dspark_deploy.console import people
from dspark_deploy.errors import InputError
from dspark_deploy.launch.rundir import make_folder
from dspark_deploy.plain_json import parse_json
from dspark_deploy.profile import load_profile
from dspark_deploy.profile.schema import MOST_REQUESTS, MOST_SEQUENCES, Profile
from tuning.accuracy import AccuracyRun
from tuning.commands.common import (
    Json,
    Machine,
    Model,
    ProfileOption,
    Sets,
    Url,
    an_endpoint,
    conclude,
    item_progress,
)
from tuning.expectations import Observed, missed
from tuning.gsm8k.completions import read_completions
from tuning.gsm8k.dataset import load_gsm8k
from tuning.gsm8k.protocols import PROTOCOLS, Protocol, find_protocol
from tuning.gsm8k.run import ITEMS, refuse_void, run_in_folder, summary, write_run
from tuning.measurement import instrumented
from tuning.record import Record, Workload, now
from tuning.workload import GSM8K

MOST_SEED = 2**31

app = typer.Typer(no_args_is_help=True, help="GSM8K by a named protocol: run it, or score its answers.")
Protocol_ = Annotated[str, typer.Option("--protocol", help=", ".join(PROTOCOLS))]


@app.command()
def run(
    data: Annotated[str, typer.Option(help="Folder with test.jsonl and train*.jsonl, or hub; or tiny")],
    protocol: Protocol_ = "strict-8shot",
    url: Url = None,
    model: Model = None,
    machine: Machine = None,
    profile: ProfileOption = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder [runs/gsm8k-PROTOCOL]")] = None,
    concurrency: Annotated[
        int, typer.Option(help="Requests in flight; the same in both arms", min=1, max=MOST_SEQUENCES)
    ] = 32,
    limit: Annotated[
        int | None, typer.Option(help="Only the first questions", min=1, max=MOST_REQUESTS)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Base seed of protocols that draw by chance", min=0, max=MOST_SEED)
    ] = 0,
    chat_template_kwargs: Annotated[str | None, typer.Option(help="JSON for the server's template")] = None,
    allow_other: Annotated[
        bool, typer.Option("--allow-other-data", help="Data in GSM8K's form that isn't GSM8K")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask the questions; items, record and progress are in the run's folder."""
    console = people(as_json)
    chosen = find_protocol(protocol, data)
    expected = load_profile(profile, sets or []).profile if profile else None  # as it is before the run
    extra = _template_arguments(chat_template_kwargs, chosen.chat)
    dataset = load_gsm8k(data, allow_other)
    questions = chosen.questions(dataset, limit)
    folder = out or Path("runs") / f"gsm8k-{protocol}"
    make_folder(folder)
    with an_endpoint(console, url, model, profile, sets, machine, instrumented) as (endpoint, engine):
        identity = {
            **chosen.describe(),
            "extra": extra,
            "seed": seed,
            "shots_sha256": dataset.shots_sha256,
            "test_sha256": dataset.test_sha256,
            "engine": engine.build,
            "profile_sha256": engine.profile_sha256,
            "model": endpoint.model,
        }
        with item_progress(console, f"gsm8k {protocol}", len(questions)) as step:
            answers = run_in_folder(
                folder,
                identity,
                questions,
                chosen.asker(endpoint, extra, seed),
                concurrency,
                lambda item: step(),
            )
    found = summary(answers, chosen)
    result = {
        **chosen.describe(),
        "shots_sha256": dataset.shots_sha256,
        "data_pinned": dataset.pinned,
        "concurrency": concurrency,
        "items": str(folder / ITEMS),
        **found,
        "unexpected": _unexpected(chosen, found, expected),
    }
    workload = Workload(
        name=f"gsm8k {protocol}",
        sha256=dataset.test_sha256,
        template=str(result["template"]),
        sampling=dict(result["sampling"]) | extra,
    )
    record = Record(
        kind="gsm8k",
        status="invalid" if found["void"] else "complete",
        created=now(),
        engine=engine,
        workload=workload,
        result=result,
    )
    show(console, result)
    _conclude(console, record, folder / "record.json", as_json)


@app.command()
def score(
    file: Annotated[Path, typer.Argument(help="items.jsonl, or lines of completion, gold, finish_reason")],
    protocol: Protocol_ = "strict-8shot",
    out: Annotated[
        Path | None, typer.Option(help="Write items.jsonl and record.json into this folder")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read the answers of a file anew, by any protocol's reading. Exit code 1 where they give no accuracy."""
    console = people(as_json)
    chosen = find_protocol(protocol)
    data = file.read_bytes() if file.is_file() else b""
    answers = AccuracyRun(read_completions(file, protocol))
    if out is not None:
        write_run(out, answers, {**chosen.describe(), "scored_sha256": hashlib.sha256(data).hexdigest()})
    found = summary(answers, chosen)
    result = {
        **chosen.describe(),
        "data_pinned": None,
        "file": str(file),
        **found,
        "scored": [
            {"id": item.id, "answer": item.answer, "correct": item.correct, "state": item.state}
            for item in answers.items
        ],
    }
    asked = _asked(file)
    record = Record(
        kind="gsm8k",
        status="invalid" if found["void"] else "complete",
        created=now(),
        engine=asked.engine if asked else None,
        workload=asked.workload if asked else None,
        result=result,
    )
    show(console, result)
    _conclude(console, record, None if out is None else out / "record.json", as_json)


def _asked(items: Path) -> Record | None:
    """The record of the run that asked these questions; None for answers that were collected elsewhere."""
    path = items.with_name("record.json")
    if items.name != ITEMS or not path.is_file():
        return None
    record = Record.read(path)
    return record if record.kind == "gsm8k" else None


def _conclude(console: Console, record: Record, place: Path | None, as_json: bool) -> None:
    """Write and print the record; raises AccuracyVoidError with it where the run is void."""
    if record.status == "invalid":
        if place is not None:
            record.write(place)
        refuse_void(record.as_json() | {"void": record.result["void"]})
    conclude(console, record, place, as_json)


def show(console: Console, result: dict[str, Any]) -> None:
    """The run in a few lines."""
    counts = result["counts"]
    for reason in result["void"]:
        console.print(f"void: {reason}", style="red", markup=False)
    if result["accuracy"] is not None:
        interval = result["accuracy_interval"]
        console.print(
            f"{result['protocol']}: {counts['correct']} of {counts['questions']} right, "
            f"{result['accuracy']:.2%} ({interval['low']:.2%} to {interval['high']:.2%})",
            markup=False,
        )
    apart = ", ".join(f"{name} {counts[name]}" for name in ("truncated", "unparsed", "degenerate", "error"))
    console.print(
        f"strict {result['strict']['share']:.2%}, flexible {result['flexible']['share']:.2%}; {apart}",
        markup=False,
    )
    for sentence in result.get("unexpected", []):
        console.print(f"unexpected: {sentence}", style="yellow", markup=False)
    if result["acceptance"]:
        length = result["acceptance"]
        console.print(
            f"acceptance length {length['pooled']:.3f} pooled, {length['mean']:.3f} per request", markup=False
        )


def _unexpected(protocol: Protocol, found: dict[str, Any], profile: Profile | None) -> list[str]:
    """What fell outside the profile's `expect`; nothing where the server was only named by its URL."""
    if profile is None:
        return []
    speculative = profile.speculative
    fixed = speculative is not None and speculative.verification.kind == "fixed"
    observed = Observed(
        label=protocol.name,
        workload=f"{GSM8K}/{protocol.name}",
        k=speculative.num_speculative_tokens if speculative else 0,
        temperature=protocol.sampling.temperature,
        thinking=protocol.wants_thinking,
        acceptance_length=found["acceptance"]["pooled"] if fixed and found["acceptance"] else None,
        accuracy=found["accuracy"],
    )
    return missed(profile.expect, observed)


def _template_arguments(text: str | None, chat: bool) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InputError(f"--chat-template-kwargs {text}: is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"--chat-template-kwargs {text}: write an object, as '{{\"thinking\": true}}'")
    if not chat:
        raise InputError("--chat-template-kwargs: this protocol sends raw prompts; use --protocol thinking")
    return {"chat_template_kwargs": found}
