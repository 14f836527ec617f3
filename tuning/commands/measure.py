"""`dspark-tune measure`: the arms of a profile, each on engines of its own, by the sweep's measuring code.

    dspark-tune measure --profile cpu-tiny.yaml
    dspark-tune measure --profile mi355x.yaml --workload sharegpt --data sharegpt.json --boots 3
    dspark-tune measure --profile mi355x.yaml --workload random          the seed protocol: latency only
    dspark-tune measure --profile mi355x.yaml --rates 2,8 --goodput ttft:2000,tpot:50

The folder has a run directory for each arm and boot, `record.json` and `report.html`. Exit code 7 where an
arm loses accuracy against the reference, however fast it is. Not covered: choosing k, which `sweep` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_deploy.console import people
from dspark_deploy.errors import EngineError, GateFailed, InputError, MeasurementError
from dspark_deploy.launch.rundir import fresh_folder, make_folder
from dspark_deploy.profile.schema import MOST_BOOTS, MOST_REQUESTS, MOST_TEMPERATURE, MOST_TOKENS, Expectation
from tuning.accuracy import MOST_TRUNCATED, AccuracyRun
from tuning.arm_result import arm_json, failed_arm, level_name
from tuning.arms import ARMS, REFERENCE, Arm, arms
from tuning.commands.common import (
    LEAST_MARGIN,
    MOST_MARGIN,
    Json,
    Sets,
    checked_profile,
    conclude,
    counts,
    finite,
    require_libraries,
    words,
)
from tuning.commands.common import (
    rates as numbers_above_0,
)
from tuning.expectations import Observed, holding, missed
from tuning.judging.comparison import FAIL, compare
from tuning.measurement import Measurement, Plan, measure
from tuning.plans import refuse_what_cannot_be_asked
from tuning.record import Record, Workload, now, own_engine
from tuning.verdicts import judge_acceptance
from tuning.workload import WORKLOADS, RandomTokens, find_workload
from tuning.workload import Workload as LoadWorkload

SEED_REQUESTS = 8


def measure_command(
    profile: Annotated[str, typer.Option(help="YAML file, or the name of a shipped profile")],
    sets: Sets = None,
    arm_names: Annotated[str, typer.Option("--arms", help="Which, and no others")] = ",".join(ARMS),
    workload: Annotated[str | None, typer.Option(help=f"Of {', '.join(WORKLOADS)}")] = None,
    data: Annotated[Path | None, typer.Option(help="The workload's file")] = None,
    loads: Annotated[str | None, typer.Option(help="Requests in flight, as 1,8,32")] = None,
    rates: Annotated[str | None, typer.Option(help="Open loop: requests per second, as 2,8")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests at each level", min=1, max=MOST_REQUESTS)
    ] = None,
    input_tokens: Annotated[int, typer.Option(help="Of workload random", min=1, max=MOST_TOKENS)] = 1024,
    output_tokens: Annotated[
        int | None, typer.Option(help="At most, per answer", min=2, max=MOST_TOKENS)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="How tokens are drawn", min=0, max=MOST_TEMPERATURE, callback=finite),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of full length")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts as messages, the server's template")] = False,
    goodput: Annotated[str | None, typer.Option(help="Limits in ms, as ttft:2000,tpot:50")] = None,
    boots: Annotated[
        int,
        typer.Option(help="Engines per arm; two or more give intervals over boots", min=1, max=MOST_BOOTS),
    ] = 1,
    accuracy_problems: Annotated[
        int | None,
        typer.Option(help="Questions, where there are any; 0 for none", min=0, max=MOST_REQUESTS),
    ] = None,
    accuracy_margin: Annotated[
        float | None,
        typer.Option(
            help="Largest loss that is accepted", min=LEAST_MARGIN, max=MOST_MARGIN, callback=finite
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder [runs/measure-PROFILE]")] = None,
    report: Annotated[bool, typer.Option(help="Write report.html")] = True,
    as_json: Json = False,
) -> None:
    """Measure reference, fused, fixed and adaptive on the same prompts; write record.json and report.html."""
    console = people(as_json)
    closed = None if loads is None else counts(loads, "--loads")
    arrivals, limits = numbers_above_0(rates, "--rates"), _limits(goodput)
    loaded, facts = checked_profile(console, profile, sets)
    needed = {"pandas": "vllm bench serve reads its prompts with it: pip install pandas"}
    if report:
        line = "report.html needs it: pip install 'dspark-deploy[report]', or use --no-report"
        needed |= {"plotly": line, "jinja2": line}
    require_libraries(needed)
    settings = loaded.profile.sweep
    source = find_workload(workload or settings.workload, data)
    seed = isinstance(source, RandomTokens)
    if isinstance(source, RandomTokens):
        source.input_tokens = input_tokens
        source.output_tokens = output_tokens or source.output_tokens
    margin = settings.accuracy_margin if accuracy_margin is None else accuracy_margin
    plan = Plan(
        loads=closed or ([1] if seed else list(settings.loads)),
        rates=arrivals,
        requests=requests or (SEED_REQUESTS if seed else settings.prompts_per_load),
        output_tokens=source.output_tokens
        if isinstance(source, RandomTokens)
        else output_tokens or settings.output_tokens,
        temperature=settings.temperature if temperature is None else temperature,
        accuracy_problems=settings.accuracy_problems if accuracy_problems is None else accuracy_problems,
        ignore_eos=ignore_eos or seed,
        chat=chat,
        limits=limits,
        strict=False,
    )
    refuse_what_cannot_be_asked(plan, source, loaded)
    folder = out or Path("runs") / f"measure-{loaded.profile.name}"
    if (folder / "record.json").exists():
        raise InputError(f"{folder}: has a record already; use --out FOLDER")
    if (folder / "report.html").is_dir():
        raise InputError(f"{folder / 'report.html'}: is in the way; it is a folder")
    make_folder(folder)
    chosen = arms(loaded, facts, words(arm_names) or [])
    found, answers = _run(console, chosen, facts, plan, source, folder, boots)
    comparisons = _accuracy(answers, margin)
    expectations = loaded.profile.expect
    result = {
        "ranks_k": source.ranks_k,
        "loads": list(plan.loads),
        "rates": list(plan.rates),
        "requests": plan.requests,
        "boots": boots,
        "limits_ms": dict(plan.limits),
        "arms": found,
        "accuracy_margin": margin,
        "against_reference": comparisons,
        "verdicts": _verdicts(found, expectations, source, plan),
        "unexpected": [
            sentence
            for arm in found
            if arm["state"] == "complete"
            for sentence in missed(expectations, _observed(arm, source, plan))
        ],
    }
    record = Record(
        kind="measure",
        status="complete" if any(arm["state"] == "complete" for arm in found) else "invalid",
        created=now(),
        engine=own_engine(loaded, facts),
        workload=Workload(
            name=source.name,
            sha256=source.fingerprint(),
            template="the server's chat template" if chat else source.template,
            sampling={
                "temperature": plan.temperature,
                "max_tokens": plan.output_tokens,
                "ignore_eos": plan.ignore_eos,
            },
        ),
        result=result,
    )
    record.write(folder / "record.json")
    if report:
        from tuning.record_report import write_record_report

        write_record_report([record.as_json()], folder / "report.html")
    show(console, record.as_json())
    if record.status == "invalid":
        error = MeasurementError("no arm could be measured; the reasons are above")
        error.document = record.as_json()
        raise error
    lost = [name for name, each in comparisons.items() if each["verdict"] == FAIL]
    if lost:
        raise GateFailed(
            f"accuracy was lost against the reference: {', '.join(lost)}; their speed doesn't count",
            record.as_json(),
        )
    conclude(console, record, folder / "record.json", as_json)


def _run(
    console: Console, chosen: list[Arm], facts: Any, plan: Plan, source: Any, folder: Path, boots: int
) -> tuple[list[dict[str, Any]], dict[str, AccuracyRun]]:
    """Every arm, boot by boot, the arms taking turns so that a slow hour slows all alike."""
    measured: dict[str, list[Measurement]] = {arm.name: [] for arm in chosen}
    answers: dict[str, AccuracyRun] = {}
    reasons = {arm.name: arm.refused for arm in chosen if arm.refused}
    for boot in range(1, boots + 1):
        for arm in chosen:
            if arm.name in reasons:
                continue
            place = folder / "arms" / f"{arm.name}-{boot}"
            fresh_folder(place)
            label = f"{arm.name}, boot {boot} of {boots}"
            # Greedy answers are about the build, and one boot has them all.
            problems = plan.accuracy_problems if boot == 1 else 0
            turn = replace(plan, repeat=boot - 1, accuracy_problems=problems)

            def say(phase: str, label: str = label) -> None:
                console.print(f"{label}: {phase}", markup=False)

            try:
                found, run, _ = measure(arm.loaded, facts, turn, source, place, say)
            except (EngineError, MeasurementError) as error:
                reasons[arm.name] = str(error)
                console.print(f"{label}: failed: {error}", markup=False)
                continue
            measured[arm.name].append(found)
            if run.items:
                run.write(place / "accuracy.jsonl")
                answers[arm.name] = run
    documents = [
        failed_arm(arm, reasons[arm.name])
        if arm.name in reasons
        else arm_json(arm, measured[arm.name], answers.get(arm.name))
        for arm in chosen
    ]
    return documents, answers


def _accuracy(answers: dict[str, AccuracyRun], margin: float) -> dict[str, dict[str, Any]]:
    """Every arm's answers against the reference's, by arm."""
    if REFERENCE not in answers:
        return {}
    return {
        name: compare(answers[REFERENCE], run, margin) for name, run in answers.items() if name != REFERENCE
    }


def _observed(arm: dict[str, Any], source: LoadWorkload, plan: Plan) -> Observed:
    """What an arm measured, to be held against the profile's `expect`."""
    k, counts = arm["num_speculative_tokens"], arm["accuracy"]
    means = {row["level"]: row["tpot_ms"] for row in arm["over_boots"]}
    fixed = (arm["acceptance"] or {}).get("per_position") is not None
    return Observed(
        label=arm["arm"],
        workload=source.name,
        k=k,
        temperature=plan.temperature,
        thinking=None if plan.chat else False,  # with --chat, the server's template decides
        acceptance_length=arm["acceptance"]["length"] if k and fixed and source.ranks_k else None,
        accuracy=counts["correct"] / counts["questions"] if counts and counts["questions"] else None,
        tpot_ms={load: means[level] for load in plan.loads if (level := level_name(load, None)) in means},
    )


def _verdicts(
    found: list[dict[str, Any]], expectations: Sequence[Expectation], source: LoadWorkload, plan: Plan
) -> list[dict[str, str]]:
    """What is wrong with each arm's acceptance; nothing on random tokens, where it means nothing."""
    rows = []
    for arm in found:
        rates = (arm.get("acceptance") or {}).get("per_position")
        if not rates or not source.ranks_k:
            continue
        held = holding(expectations, _observed(arm, source, plan))
        expected = next((each.acceptance_length for each in held if each.acceptance_length), None)
        for verdict in judge_acceptance(rates, expected=expected):
            rows.append(
                {
                    "arm": arm["arm"],
                    "name": verdict.name,
                    "message": verdict.message,
                    "remedy": verdict.remedy,
                }
            )
    return rows


def _limits(text: str | None) -> dict[str, float]:
    limits: dict[str, float] = {}
    for word in words(text) or []:
        name, _, value = word.partition(":")
        number = float(value) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value, re.ASCII) else 0.0
        if name not in ("ttft", "tpot", "e2el") or name in limits or not number:
            raise InputError(
                f"--goodput {text}: {word!r} is no limit; write ttft:2000,tpot:50 (milliseconds, each once)"
            )
        limits[name] = number
    return limits


def show(console: Console, document: dict[str, Any]) -> None:
    """The arms as a table, then what a reader must know of each."""
    result, engine = document["result"], document["engine"]
    table = Table(title=f"{engine['profile']}, {engine['hardware']}", title_justify="left")
    for column in ("arm", "level"):
        table.add_column(column)
    for column in ("TTFT p50", "TPOT mean", "interval", "TPOT p99", "gap p99", "tokens/s/user", "tokens/s"):
        table.add_column(column, justify="right")
    table.add_column("acceptance length", justify="right")
    reasons: list[str] = []
    for arm in result["arms"]:
        if arm["state"] != "complete":
            reasons.append(f"{arm['arm']}: not measured: {arm['reason']}")
            continue
        for load in arm["loads"]:
            if not load["valid"]:
                reasons.append(f"{arm['arm']}, {load['level']}: invalid: {'; '.join(load['reasons'])}")
                continue
            tpot, gap = load["tpot_ms"], load["chunk_gap_ms"]
            interval = tpot["mean_interval"]
            table.add_row(
                arm["arm"],
                load["level"],
                f"{load['ttft_ms']['p50']:.1f}",
                f"{tpot['mean']:.2f}",
                f"{interval['low']:.2f} to {interval['high']:.2f}",
                f"{tpot['p99']:.2f}",
                f"{gap['p99']:.1f}" if gap else "",
                f"{load['tokens_per_s_per_user']:.1f}",
                f"{load['output_tokens_per_s']:.0f}",
                f"{load['acceptance']['length']:.3f}" if result["ranks_k"] else "",
            )
    console.print(table)
    for reason in reasons:
        console.print(reason, markup=False)
    if not result["ranks_k"]:
        console.print("random tokens: latency only; nothing here ranks k", markup=False)
    for name, each in result["against_reference"].items():
        found = each["comparison"]
        console.print(
            f"{name}: accuracy {each['accuracy']['after']:.2%} against {each['accuracy']['before']:.2%}, "
            f"{found['gained']} gained, {found['lost']} lost: {each['verdict']}",
            markup=False,
        )
    for arm in result["arms"]:
        counted = arm.get("accuracy")
        if counted and counted["truncated"] > MOST_TRUNCATED * counted["questions"]:
            console.print(
                f"{arm['arm']}: {counted['truncated']} of {counted['questions']} answers were cut off and "
                f"count as wrong; compare refuses so many: ask with more --output-tokens",
                style="yellow",
                markup=False,
            )
    for verdict in result["verdicts"]:
        console.print(
            f"{verdict['arm']}: {verdict['name']}: {verdict['message']}", style="yellow", markup=False
        )
