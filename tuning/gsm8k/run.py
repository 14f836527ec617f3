"""A GSM8K run in a folder: each item is on disk as soon as it is there, and a run goes on where it stopped.

identity.json      protocol, sampling, data, server: what all items of this folder belong to
progress.jsonl     items in the order in which they came
items.jsonl        all items in the questions' order, when the run is whole

A run is void, and has no accuracy, for the reasons of `AccuracyRun.void_reasons`, and where the protocol
wants thinking and no answer shows any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark_deploy.errors import InputError
from dspark_deploy.launch.rundir import make_folder, write_atomically
from dspark_deploy.plain_json import json_lines, parse_json
from tuning.accuracy import AccuracyRun, AccuracyVoidError, Item, read_item, refuse_second, run_accuracy
from tuning.gsm8k.protocols import Protocol, thought
from tuning.per_request import summarize
from tuning.statistics import proportion_interval
from tuning.workload import Question

ITEMS = "items.jsonl"


def run_in_folder(
    folder: Path,
    identity: dict[str, Any],
    questions: Sequence[Question],
    ask: Callable[[Question], Item],
    concurrency: int,
    on_item: Callable[[Item], None],
) -> AccuracyRun:
    """Ask what is owed. Raises InputError for another run's folder, AccuracyVoidError for a failure."""
    _open_folder(folder, identity)
    journal = folder / "progress.jsonl"
    wanted = {question.id for question in questions}
    done = [item for item in _read_journal(journal) if item.id in wanted]
    for item in done:
        on_item(item)
    with journal.open("a", encoding="utf-8") as handle:

        def keep(item: Item) -> None:
            handle.write(json.dumps(asdict(item)) + "\n")
            handle.flush()
            on_item(item)

        run = run_accuracy(questions, ask, concurrency=concurrency, done=done, on_item=keep)
    run.write(folder / ITEMS)
    return run


def write_run(folder: Path, run: AccuracyRun, identity: dict[str, Any]) -> None:
    """A run that was asked elsewhere, as a folder. Raises InputError for another run's folder."""
    _open_folder(folder, identity)
    run.write(folder / ITEMS)


def _open_folder(folder: Path, identity: dict[str, Any]) -> None:
    make_folder(folder)
    _check_identity(folder / "identity.json", identity)


def _check_identity(path: Path, identity: dict[str, Any]) -> None:
    text = json.dumps(identity, indent=1, sort_keys=True) + "\n"
    if not path.exists():
        write_atomically(path, text)
        return
    try:
        stored = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: is damaged ({error}); start anew with --out FOLDER") from error
    differing = [key for key in sorted({*stored, *identity}) if stored.get(key) != identity.get(key)]
    if differing:
        raise InputError(
            f"{path.parent}: belongs to another run: {', '.join(differing)} differ; "
            f"start anew with --out FOLDER"
        )


def _read_journal(path: Path) -> list[Item]:
    """Items of an earlier attempt. A last line that was cut off is dropped, from the file too."""
    if not path.is_file():
        return []
    found: dict[str, Item] = {}
    kept = []
    for _, line in json_lines(path.read_text(encoding="utf-8")):
        try:
            item = read_item(line)
            refuse_second(item.id, found)
        except ValueError:
            break
        found[item.id] = item
        kept.append(line + "\n")
    write_atomically(path, "".join(kept))
    return list(found.values())


def void_reasons(run: AccuracyRun, protocol: Protocol) -> list[str]:
    """Why a whole run has no accuracy; empty where it has one."""
    items, reasons = run.items, run.void_reasons(protocol.sampling.max_tokens)
    if protocol.wants_thinking and items and not any(thought(item) for item in items):
        reasons.append(
            "no answer shows thinking, which this protocol wants on: see the model's chat_template_kwargs, "
            "as --chat-template-kwargs '{\"thinking\": true}'"
        )
    return reasons


def summary(run: AccuracyRun, protocol: Protocol) -> dict[str, Any]:
    """The run in numbers; `accuracy` is None where it is void. Intervals are Wilson's, 95 %."""
    items, reasons = run.items, void_reasons(run, protocol)
    counts = run.counts()
    by_request = summarize(run.steps)

    def share(right: int) -> dict[str, Any]:
        return {"share": right / len(items), "interval": asdict(proportion_interval(right, len(items)))}

    return {
        "void": reasons,
        "accuracy": None if reasons else run.accuracy,
        "accuracy_interval": None if reasons else share(counts["correct"])["interval"],
        "strict": share(sum(item.strict == item.gold for item in items)),
        "flexible": share(sum(item.flexible == item.gold for item in items)),
        "counts": counts,
        "finish_reasons": {
            reason: sum(item.finish_reason == reason for item in items)
            for reason in sorted({item.finish_reason for item in items})
        },
        "acceptance": asdict(by_request) if by_request else None,
    }


def refuse_void(found: dict[str, Any]) -> None:
    """Raise AccuracyVoidError, which carries `found`, where the run is void."""
    if found["void"]:
        error = AccuracyVoidError("the run is void: " + "; ".join(found["void"]))
        error.document = found
        raise error
