"""The command `dspark-tune`: measure every configuration of a space, and write the best profile back.

    dspark-tune sweep --profile cpu-tiny.yaml
    dspark-tune sweep --profile cpu-tiny.yaml --num-speculative-tokens none,1,3,5,7 --loads 1,8

Interrupted sweeps go on where they stopped: run the same command again. Exit codes: 0 good; 2 bad input;
3 preflight refused; 5 the engine without speculation did not start; 6 it died; 7 no configuration with
speculation kept its accuracy; 130 interrupted.

Not covered: searching beyond a grid, and more than one machine.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_deploy.console import people, print_json, run_app, show_findings
from dspark_deploy.errors import AccuracyConstraintFailed, InputError, MeasurementError, PreflightRefused
from dspark_deploy.preflight import Severity, check, probe
from dspark_deploy.profile import LoadedProfile, load_profile
from dspark_deploy.profile.loading import validated
from tuning.campaign import Campaign

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def tune() -> None:
    """Measure DSpark configurations of a profile, and find the best."""


@app.command()
def sweep(
    profile: Annotated[str, typer.Option(help="YAML file, or the name of a shipped profile")],
    sets: Annotated[list[str] | None, typer.Option("--set", help="path=value; may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep's folder [runs/sweep-PROFILE]")] = None,
    storage: Annotated[str | None, typer.Option(help="sqlite:///FILE or journal:///FILE")] = None,
    num_speculative_tokens: Annotated[str | None, typer.Option(help="As none,1,3,5,7")] = None,
    draft_sample_method: Annotated[str | None, typer.Option(help="As greedy,probabilistic")] = None,
    loads: Annotated[str | None, typer.Option(help="Requests in flight, as 1,8,32")] = None,
    prompts_per_load: Annotated[int | None, typer.Option(help="Requests at each load level")] = None,
    accuracy_problems: Annotated[int | None, typer.Option(help="Questions of the accuracy run")] = None,
    accuracy_margin: Annotated[float | None, typer.Option(help="Largest loss that is accepted")] = None,
    goal: Annotated[str | None, typer.Option(help="latency or throughput")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure failed ones again")] = False,
    report: Annotated[bool, typer.Option(help="Write report.html")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Last stdout line is one JSON document")] = False,
) -> None:
    """Measure every configuration of the space; write best.yaml and report.html."""
    loaded = load_profile(profile, sets or [])
    given = {
        "space.num_speculative_tokens": _numbers(num_speculative_tokens, "--num-speculative-tokens"),
        "space.draft_sample_method": _words(draft_sample_method),
        "loads": _numbers(loads, "--loads"),
        "prompts_per_load": prompts_per_load,
        "accuracy_problems": accuracy_problems,
        "accuracy_margin": accuracy_margin,
        "goal": goal,
    }
    loaded = validated(loaded, {f"sweep.{key}": value for key, value in given.items() if value is not None})
    console = people(as_json)
    _require_libraries(report)
    folder = out or Path("runs") / f"sweep-{loaded.profile.name}"
    facts = probe(loaded.revised({"engine.port": 0}).profile)
    findings = check(loaded, facts)
    show_findings(console, [finding for finding in findings if finding.severity is not Severity.NOTE])
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise PreflightRefused(
            "preflight refused this sweep; the findings above say why, and what to do",
            [finding.as_json() for finding in findings],
        )
    _refuse_api_key(loaded)
    with _locked(folder):
        campaign = Campaign(loaded, facts, folder, storage, retry_failed, console)
        campaign.run()
        result = campaign.conclude(report)
    _judge(result)
    if as_json:
        print_json(result)


@app.command("jit-log")
def jit_log(
    file: Annotated[Path, typer.Argument(help="A server's log, as RUN_DIRECTORY/engine.log")],
    as_json: Annotated[bool, typer.Option("--json", help="Last stdout line is one JSON document")] = False,
) -> None:
    """Say which kernels a server compiled in which phase, and which keys the warm-up missed."""
    from tuning.jit_log import PHASES, read_log

    log = read_log(file)
    console = people(as_json)
    for phase in PHASES:
        counts = ", ".join(f"{library} {count}" for library, count in sorted(log.compiles[phase].items()))
        console.print(f"{'after ready' if phase == 'serving' else phase:12} {counts or 'none'}", markup=False)
    console.print(f"from disk    {log.from_disk}, refused {log.refused}")
    for lock, count in sorted(log.locks.items()):
        console.print(f"lock wait    {lock}: {count}", markup=False)
    for each in log.missing:
        console.print(
            f"missed       {each['library']} {each['kernel']} in {each['phase']}, {each['tokens']} tokens, "
            f"key {each['key']}",
            markup=False,
        )
    if not log.guarded:
        console.print("no line of the capture guard is in this log: keys are unknown, Triton is incomplete")
    if as_json:
        print_json(log.as_json())


def _judge(result: dict[str, Any]) -> None:
    """Raises where no speculation could be measured, or none of it kept accuracy."""
    asked = [cell for cell in result["cells"] if cell["num_speculative_tokens"]]
    speculative = [cell for cell in asked if cell["state"] == "complete"]
    if asked and not speculative:
        unmeasured = MeasurementError(
            f"no configuration with speculation could be measured; {asked[0]['configuration']}: "
            f"{asked[0]['reason']}"
        )
        unmeasured.document = result
        raise unmeasured
    if speculative and not any(cell["accurate"] for cell in speculative):
        margin, problems = (result["settings"][f"accuracy_{name}"] for name in ("margin", "problems"))
        lost = AccuracyConstraintFailed(
            f"no configuration with speculation kept its accuracy within {margin:.1%} of the reference; "
            f"is a kernel or the draft wrong, or are {problems} problems too few?"
        )
        lost.document = result
        raise lost


def _refuse_api_key(loaded: LoadedProfile) -> None:
    """The tuner sends no key, so an engine that wants one would answer 401 after a whole boot."""
    engine = loaded.profile.engine
    if "api-key" in engine.args or "VLLM_API_KEY" in {**engine.env, **os.environ}:
        raise InputError(
            "the engine would ask for an API key (engine.args.api-key or VLLM_API_KEY), and dspark-tune "
            "sends none; leave it out for tuning, on a host that only this machine reaches"
        )


def _require_libraries(report: bool) -> None:
    needed = {"pandas": "vllm bench serve reads its prompts with it: pip install pandas"}
    if report:
        line = "report.html needs it: pip install 'dspark-deploy[report]', or use --no-report"
        needed |= {"plotly": line, "jinja2": line}
    missing = [f"{name}: {why}" for name, why in needed.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError([f"missing library {line}" for line in missing])


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str | None, flag: str) -> list[int | str] | None:
    words = _words(text)
    if words is None:
        return None
    bad = [word for word in words if not (word.isdecimal() or word == "none")]
    if bad or not words:
        raise InputError(f"{flag} {text}: {bad[0] if bad else 'nothing'!r} is no number; write it as 1,3,5")
    return [int(word) if word.isdecimal() else word for word in words]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises InputError where another sweep has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror}") from error
    with (folder / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{folder}: another sweep is running in it; use --out FOLDER") from error
        yield


def main() -> None:
    """Entry point of `dspark-tune`."""
    run_app(app, "dspark-tune")


if __name__ == "__main__":
    main()
