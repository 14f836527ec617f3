"""The command `dspark-tune`: measure the configurations of a space, and write the best profiles back.

    dspark-tune sweep --profile cpu-tiny.yaml
    dspark-tune sweep --profile cpu-tiny.yaml --num-speculative-tokens none,1,3,5,7 --loads 1,8
    dspark-tune sweep --profile mi355x.yaml --storage postgresql://tuner@db/sweeps --gpus 0,1,2,3
    dspark-tune serve-best runs/sweep-cpu-tiny --goal throughput

The other subcommands (measure, acceptance, gsm8k, compare, accuracy-gate, divergence, predict, kernels,
report, serve-best, storage-proxy) have a module each in `tuning.commands`. Interrupted sweeps go on where
they stopped: run the same command again. Exit codes: 0 good; 2 bad input; 3 preflight refused; 5 the engine
without speculation did not start; 6 it died; 7 no configuration with speculation kept its accuracy; 130
interrupted. `docs/searching.md` says how a space is searched.

Not covered: settings of the machine, such as clocks and power limits.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_deploy.console import people, print_json, run_app, show_findings
from dspark_deploy.errors import AccuracyConstraintFailed, InputError, MeasurementError, PreflightRefused
from dspark_deploy.launch.rundir import discard_partial
from dspark_deploy.preflight import Severity, check, probe
from dspark_deploy.profile import load_profile
from dspark_deploy.profile.loading import validated
from dspark_deploy.profile.schema import Hardware
from tuning.campaign import Campaign
from tuning.commands import gsm8k
from tuning.commands.acceptance import acceptance
from tuning.commands.common import numbers, refuse_api_key, require_libraries, words
from tuning.commands.compare import accuracy_gate, compare_command
from tuning.commands.divergence import divergence
from tuning.commands.kernels import kernels
from tuning.commands.measure import measure_command
from tuning.commands.predict import predict_command
from tuning.commands.report import report as report_command
from tuning.commands.serve_best import serve_best
from tuning.commands.storage_proxy import storage_proxy
from tuning.conclusion import conclude
from tuning.judging.comparison import FAIL
from tuning.opening import Options
from tuning.statistics import fewest_questions
from tuning.storage import KINDS
from tuning.workers import own_gpus
from tuning.workload import WITH_ANSWERS

# What a sweep writes at its end.
WRITTEN = (
    *("best.yaml", "best-latency.yaml", "best-throughput.yaml", "best-slo.yaml"),
    *("result.json", "report.html"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def tune() -> None:
    """Measure DSpark configurations of a profile, and find the best."""


@app.command()
def sweep(
    profile: Annotated[str, typer.Option(help="YAML file, or the name of a shipped profile")],
    sets: Annotated[list[str] | None, typer.Option("--set", help="path=value; may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep's folder [runs/sweep-PROFILE]")] = None,
    storage: Annotated[str | None, typer.Option(help=f"Shared by workers: {KINDS}")] = None,
    seed_from: Annotated[
        str | None, typer.Option(help="Folder or study to take fitting measurements from")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="This worker's own GPUs, as 0,1")] = None,
    num_speculative_tokens: Annotated[str | None, typer.Option(help="As none,1,3,5,7")] = None,
    draft_sample_method: Annotated[str | None, typer.Option(help="As greedy,probabilistic")] = None,
    sampler: Annotated[str | None, typer.Option(help="auto, grid, tpe, gp, nsga2 or random")] = None,
    trials: Annotated[
        int | None, typer.Option(help="Configurations to launch in all, resumed or not")
    ] = None,
    search: Annotated[str | None, typer.Option(help="all, or predicted: prune by predicted TPOT")] = None,
    workload: Annotated[str | None, typer.Option(help=f"With answers: {', '.join(WITH_ANSWERS)}")] = None,
    data: Annotated[str | None, typer.Option(help="The workload's files; of gsm8k also hub")] = None,
    loads: Annotated[str | None, typer.Option(help="Requests in flight, as 1,8,32")] = None,
    prompts_per_load: Annotated[int | None, typer.Option(help="Requests at each load level")] = None,
    accuracy_problems: Annotated[int | None, typer.Option(help="Questions of the accuracy run")] = None,
    accuracy_margin: Annotated[float | None, typer.Option(help="Largest loss that is accepted")] = None,
    finalists: Annotated[int | None, typer.Option(help="Configurations that are booted again")] = None,
    boots: Annotated[int | None, typer.Option(help="Boots of each finalist; 0 for none")] = None,
    goal: Annotated[str | None, typer.Option(help="latency, throughput or slo")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure failed ones again")] = False,
    report: Annotated[bool, typer.Option(help="Write report.html")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Last stdout line is one JSON document")] = False,
) -> None:
    """Search the profile's space; write best.yaml, one profile for each goal, and report.html."""
    loaded = load_profile(profile, sets or [])
    given = {
        "space.num_speculative_tokens": numbers(num_speculative_tokens, "--num-speculative-tokens"),
        "space.draft_sample_method": words(draft_sample_method),
        "sampler": sampler,
        "trials": trials,
        "search": search,
        "workload": workload,
        "data": data,
        "loads": numbers(loads, "--loads"),
        "prompts_per_load": prompts_per_load,
        "accuracy_problems": accuracy_problems,
        "accuracy_margin": accuracy_margin,
        "finalists": finalists,
        "boots": boots,
        "goal": goal,
    }
    loaded = validated(loaded, {f"sweep.{key}": value for key, value in given.items() if value is not None})
    console = people(as_json)
    needed = {"pandas": "vllm bench serve reads its prompts with it: pip install pandas"}
    if report:
        line = "report.html needs it: pip install 'dspark-deploy[report]', or use --no-report"
        needed |= {"plotly": line, "jinja2": line}
    require_libraries(needed)
    folder = out or Path("runs") / f"sweep-{loaded.profile.name}"
    facts = probe(loaded.revised({"engine.port": 0}).profile)
    findings = check(loaded, facts)
    show_findings(console, [finding for finding in findings if finding.severity is not Severity.NOTE])
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise PreflightRefused(
            "preflight refused this sweep; the findings above say why, and what to do",
            [finding.as_json() for finding in findings],
        )
    refuse_api_key(loaded)
    own = _gpus(gpus, loaded.profile.hardware)
    options = Options(storage, seed_from, retry_failed, own, ("dspark-tune", *sys.argv[1:]))
    with locked(folder), own_gpus(own or range(loaded.profile.hardware.gpus)):
        campaign = Campaign(loaded, facts, folder, options, console)
        campaign.run()
        result = conclude(campaign, report)
    _judge(result)
    if as_json:
        print_json(result)


def _gpus(text: str | None, hardware: Hardware) -> tuple[int, ...]:
    """The GPUs of --gpus; none where it is not given. Raises InputError where they are too few."""
    found = [number for number in numbers(text, "--gpus") or [] if isinstance(number, int)]
    if text is not None and hardware.platform == "cpu":
        raise InputError(f"--gpus {text}: the profile runs on the CPU (hardware.platform: cpu); leave it out")
    if text is not None and len(set(found)) < hardware.gpus:
        raise InputError(f"--gpus {text}: the profile wants {hardware.gpus} GPUs on {hardware.platform}")
    return tuple(dict.fromkeys(found))


@app.command("jit-log")
def jit_log(
    file: Annotated[Path, typer.Argument(help="A server's log, as RUN_DIRECTORY/engine.log")],
    as_json: Annotated[bool, typer.Option("--json", help="Last stdout line is one JSON document")] = False,
) -> None:
    """Say which kernels a server compiled in which phase, and which keys the warm-up missed."""
    from tuning.jit_log import read_log, report_lines

    log = read_log(file)
    console = people(as_json)
    for line in report_lines(log):
        console.print(line, markup=False)
    if as_json:
        print_json(log.as_json())


app.command("measure")(measure_command)
app.command("acceptance")(acceptance)
app.add_typer(gsm8k.app, name="gsm8k")
app.command("compare")(compare_command)
app.command("accuracy-gate")(accuracy_gate)
app.command("divergence")(divergence)
app.command("kernels")(kernels)
app.command("predict")(predict_command)
app.command("report")(report_command)
app.command("serve-best")(serve_best)
app.command("storage-proxy")(storage_proxy)


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
        if any(cell["accuracy_verdict"] == FAIL for cell in speculative):
            message = (
                f"no configuration with speculation kept its accuracy within {margin:.1%} of the reference; "
                f"is a kernel or the draft wrong?"
            )
        else:
            message = (
                f"whether speculation keeps its accuracy within {margin:.1%} of the reference can't be told "
                f"from {problems} questions: ask more with --accuracy-problems, at least "
                f"{fewest_questions(margin)} where not one answer is lost"
            )
        lost = AccuracyConstraintFailed(message)
        lost.document = result
        raise lost


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises InputError where another sweep has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / "lock").open("w")
    except OSError as error:
        raise InputError(f"{folder}: a sweep can't write there: {error.strerror}") from error
    with opened as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{folder}: another sweep is running in it; use --out FOLDER, a folder for each worker"
            ) from error
        taken = [name for name in WRITTEN if (folder / name).is_dir()]
        if taken:
            raise InputError(
                f"{folder / taken[0]}: is a folder, and a sweep writes a file there; move it away"
            )
        discard_partial(folder)  # of a sweep that was killed while it wrote
        yield


def main() -> None:
    """Entry point of `dspark-tune`."""
    run_app(app, "dspark-tune")


if __name__ == "__main__":
    main()
