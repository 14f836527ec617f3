"""The upstream fault in a tiny DeepSeek-V4 on the CPU engine: what accuracy, acceptance and gate say.

    python -m bench.fault --out bench/results/fault.json       # as `make demo-fault`, and kept

A kernel that sums a norm over half of the wavefront gives a layer input that is sqrt(2) too large, behind the
norm. `bench.planted` puts that factor nowhere, into target and draft, or into one of them. Each engine is
served from `cpu-v4.yaml` and asked the same questions greedily; its answers go to `dspark-tune accuracy-gate`
against the healthy ones, and `dspark-serve` starts each again with `mhc.gate: refuse`, as an operator would.

What the documents claim is compared with what was seen: exit code 0 where all of it holds, 1 with a line for
each claim that does not, 2 for input that can't be used, 130 when stopped.

A demonstration on the CPU engine: the factor is planted, not computed by a kernel. What computes it is shown
under emulation in `docs/wave64.md`. Not covered: faults that grow with depth; real DeepSeek-V4 has 43 layers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.planted import planted
from dspark_deploy.console import interrupts
from dspark_deploy.errors import DSparkError, InputError, MeasurementError, NumericsRefused
from dspark_deploy.launch import numerics
from dspark_deploy.launch.command import served_name
from dspark_deploy.launch.engine import Engine
from dspark_deploy.launch.log import meaningful_lines
from dspark_deploy.launch.rundir import RunDirectory, write_atomically
from dspark_deploy.launch.supervised import Supervised
from dspark_deploy.preflight import probe
from dspark_deploy.profile import LoadedProfile, load_profile
from tuning.acceptance import acceptance_between
from tuning.accuracy import AccuracyRun, greedy, run_accuracy
from tuning.endpoint import Endpoint
from tuning.machine import describe_machine
from tuning.workload import TinyArithmetic

ROOT = Path(__file__).resolve().parent.parent
PROFILE, MARGIN, TOKENS, CONCURRENCY = "cpu-v4.yaml", 0.01, 96, 96
SETS = ["engine.port=0", f"engine.args.max-num-seqs={CONCURRENCY}"]
HEALTHY, WRONG_RATIO, NEAR = "none", 2**0.5, 0.01
COMMAND_SECONDS, POLL_S = 300, 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One engine, and what the documents claim of it. `length_within`: of the healthy acceptance length."""

    name: str
    where: str
    accuracy_gate: str
    length_within: float


CASES = (
    Case(HEALTHY, "nowhere", "pass", 0.0),
    Case("target and draft", "both", "fail", 0.10),
    Case("the target alone", "target", "fail", 0.25),
    Case("the draft alone", "draft", "pass", 0.10),
)


def profile(gate: str) -> LoadedProfile:
    """What every engine of the demonstration is served from."""
    return load_profile(PROFILE, [*SETS, f"mhc.gate={gate}"])


def answer(case: Case, questions: int, folder: Path) -> dict[str, Any]:
    """Serve one engine, ask it, and write its answers to `folder`/items.jsonl; what was seen meanwhile."""
    # The healthy engine must serve although it is gated; the others are gated by `refused`.
    loaded, workload = profile("refuse" if case.name == HEALTHY else "warn"), TinyArithmetic()
    with (
        planted(case.where, folder / "plugin"),
        Engine.start(loaded, probe(loaded.profile), RunDirectory(folder), []) as engine,
    ):
        report = engine.wait_ready()
        with Endpoint(engine.url, served_name(loaded.profile)) as endpoint:
            before = endpoint.scrape()
            ask = greedy(endpoint, TOKENS, workload.answer)
            run = run_accuracy(workload.questions(questions), ask, concurrency=CONCURRENCY)
            accepted = acceptance_between(before, endpoint.scrape())
    run.write(folder / "items.jsonl")
    gate = numerics.sections(report.processes)
    ratios = [row["ratio"] for row in numerics.worst(gate) if row["cause"]]
    return {
        "correct": sum(run.correct),
        "acceptance_length": round(accepted.length, 3),
        "numerics_gate": numerics.state(gate),
        "ratio": max(ratios, default=1.0),
    }


def started(arguments: list[str], log: Path) -> Supervised:
    """One of the product's commands, under way; to be used as a context, and given to `ended`."""
    return Supervised([sys.executable, "-m", *arguments, "--json"], os.environ, log)


def ended(process: Supervised) -> tuple[int | None, dict[str, Any]]:
    """Exit code of a command, and the JSON document on its last line.

    A server that says it is ready has no exit code. Raises MeasurementError for a command that doesn't end,
    or has no document.
    """
    deadline = time.monotonic() + COMMAND_SECONDS
    while True:
        code = process.poll()
        whole = process.log.read_text().rpartition("\n")[0].splitlines()
        lines = [line for line in whole if line.startswith("{")]
        said = json.loads(lines[-1]) if lines else {}
        if said and (code is not None or said.get("status") == "ready"):
            return code, said
        if code is not None or time.monotonic() > deadline:
            why = "\n".join(meaningful_lines(process.log))
            how = f"did not end within {COMMAND_SECONDS} s" if code is None else f"ended with {code}"
            raise MeasurementError(f"{process.command[2]} {how}, and no document:\n{why}")
        time.sleep(POLL_S)


@contextmanager
def refusing(case: Case, folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """`dspark-serve` with a faulty engine and `mhc.gate: refuse`, booting beside what is done meanwhile.

    What is yielded waits for its end: exit code, and what it said.
    """
    sets = [word for each in (*SETS, "mhc.gate=refuse") for word in ("--set", each)]
    serve = ["dspark_deploy.serve", "--profile", PROFILE, *sets, "--quiet"]
    with planted(case.where, folder / "plugin"):
        process = started([*serve, "--run-dir", str(folder / "runs")], folder / "boot.log")

    def end() -> dict[str, Any]:
        code, said = ended(process)
        return {"exit_code": code, "error": said.get("error", "")}

    with process:
        yield end


def judge(case: Case, folder: Path) -> dict[str, Any]:
    """`dspark-tune accuracy-gate` of the healthy engine's answers against this one's."""
    healthy, ours = folder.parent / HEALTHY / "items.jsonl", folder / "items.jsonl"
    arguments = ["accuracy-gate", str(healthy), str(ours), "--margin", str(MARGIN)]
    with started(["tuning.sweep", *arguments], folder / "gate.log") as process:
        code, said = ended(process)
    result = said["result"]
    found = result["comparison"]
    return {
        "verdict": result["verdict"],
        "exit_code": code,
        **{name: found[name] for name in ("gained", "lost", "difference", "p_value")},
        # Numbers of the questions, from 0 on: what fewer questions would have shown is in them.
        **{
            f"{which}_questions": [int(name.rpartition("-")[2]) for name in result[which]]
            for which in ("gained", "lost")
        },
    }


def demonstrate(questions: int, folder: Path) -> dict[str, Any]:
    """Every case, each in a folder of its own below `folder`."""
    began = time.monotonic()
    rows = []
    healthy: AccuracyRun | None = None
    for case in CASES:
        print(f"fault: {case.name}: {questions} questions", file=sys.stderr, flush=True)
        place = folder / case.name
        place.mkdir()
        boot: dict[str, Any] = {"exit_code": None}
        if case.name == HEALTHY:
            row = answer(case, questions, place)
        else:
            with refusing(case, place) as end:  # two cores: one boots while the other answers
                row, boot = answer(case, questions, place), end()
        run = AccuracyRun.read(place / "items.jsonl")
        healthy = healthy or run
        row |= {"accuracy_gate": judge(case, place), "identical": run.identical_to(healthy)}
        rows.append({"fault": case.name, **row, "boot": boot})
    loaded = profile("warn")
    speculative = loaded.profile.speculative
    assert speculative is not None
    return {
        "machine": describe_machine(probe(loaded.profile)),
        "origin": "CPU engine, fault planted",
        "command": f"python -m bench.fault --problems {questions}",
        "questions": questions,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "accuracy_margin": MARGIN,
        "seconds": round(time.monotonic() - began, 1),
        "rows": rows,
    }


def broken_claims(rows: list[dict[str, Any]]) -> list[str]:
    """What the documents claim and was not seen, one line each."""
    broken = []
    length = rows[0]["acceptance_length"]

    def claim(case: Case, what: str, wanted: Any, found: Any, holds: bool | None = None) -> None:
        if not (wanted == found if holds is None else holds):
            broken.append(f"{case.name}: {what}: claimed {wanted}, seen {found}")

    for case, row in zip(CASES, rows, strict=True):
        faulty = case.name != HEALTHY
        gate, change = row["accuracy_gate"], abs(row["acceptance_length"] / length - 1)
        claim(case, "accuracy gate", case.accuracy_gate, gate["verdict"])
        claim(case, "its exit code", 0 if case.accuracy_gate == "pass" else 7, gate["exit_code"])
        near = change <= case.length_within
        claim(case, "acceptance length", f"within {case.length_within:.0%}", f"{change:.1%} off", near)
        claim(case, "numerics gate", "wrong" if faulty else "passed", row["numerics_gate"])
        ratio = WRONG_RATIO if faulty else 1.0
        claim(case, "ratio", round(ratio, 4), row["ratio"], abs(row["ratio"] - ratio) < NEAR)
        code = NumericsRefused.exit_code if faulty else None
        claim(case, "exit code of dspark-serve with mhc.gate: refuse", code, row["boot"]["exit_code"])
    return broken


def show(document: dict[str, Any]) -> None:
    """The table, for people."""
    columns = ("fault", "accuracy", "gained/lost", "accuracy gate", "identical", "acceptance length", "boot")
    table = Table(*columns, title=f"sqrt(2) behind the fused norm ({document['origin']})")
    asked = document["questions"]
    for row in document["rows"]:
        gate, code = row["accuracy_gate"], row["boot"]["exit_code"]
        table.add_row(
            row["fault"],
            f"{row['correct']}/{asked}",
            f"{gate['gained']}/{gate['lost']}",
            f"{gate['verdict']}, p = {gate['p_value']:.2g}",
            f"{row['identical']}/{asked}",
            f"{row['acceptance_length']:.2f}",
            "serves" if code is None else f"exit code {code}, ratio {row['ratio']:.4f}",
        )
    Console(width=120).print(table)


def refuse_unwritable(out: Path) -> None:
    """Raise InputError where `out` takes no file: better now than after minutes."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise InputError(f"--out {out}: {out.parent} takes no files: {error.strerror}") from error
    if out.exists() and not out.is_file():
        raise InputError(f"--out {out}: is a folder, a device or a pipe; name a file")


def run(questions: int, out: Path | None) -> int:
    """Demonstrate, print and keep it; 1 where a claim does not hold."""
    if questions < 1:
        raise InputError(f"--problems {questions}: ask one question at least")
    if out is not None:
        refuse_unwritable(out)
    with tempfile.TemporaryDirectory(prefix="dspark-fault-") as folder:
        document = demonstrate(questions, Path(folder))
    broken = document["broken_claims"] = broken_claims(document["rows"])
    show(document)
    if out is not None:
        write_atomically(out, json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "rows"}))
    for line in broken:
        print(f"NOT AS CLAIMED: {line}", file=sys.stderr)
    return 1 if broken else 0


def main() -> int:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the document here as well")
    parser.add_argument("--problems", type=int, default=800, help="questions to each engine")
    options = parser.parse_args()
    try:
        with interrupts():
            return run(options.problems, options.out)
    except DSparkError as error:
        print(f"bench.fault: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
