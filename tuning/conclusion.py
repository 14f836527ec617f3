"""What a sweep comes to: the answer for every goal, on the terminal and in files that serve as they are.

result.json    the whole result                      report.html            the same as a page
best.yaml      the best profile for the sweep's goal best-latency.yaml, best-throughput.yaml, best-slo.yaml
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark_deploy.launch.rundir import write_atomically
from tuning.best import write_best
from tuning.campaign import Campaign
from tuning.judging.comparison import FAIL, INCONCLUSIVE
from tuning.machine import describe_machine
from tuning.measurement import Measurement
from tuning.reference import reference_json
from tuning.result import result_json
from tuning.screening import pruned
from tuning.selection import Selection, select
from tuning.space import Configuration
from tuning.storage import naming_a_lost_storage, shown
from tuning.trials import Outcome

# What stands behind a configuration that can't be chosen.
ACCURACY = {FAIL: "accuracy lost", INCONCLUSIVE: "accuracy unknown"}


def conclude(campaign: Campaign, report: bool) -> dict[str, Any]:
    """Select, print the table, write the files; returns the result. Raises MeasurementError."""
    with naming_a_lost_storage(campaign.opened.url):
        outcomes = in_order(campaign)
        front = campaign.study.pareto()
        search = search_json(campaign, outcomes)
    found = campaign.candidates(outcomes)
    settings = campaign.settings
    selections = {
        goal: select(found, goal, settings.loads, settings.slo, campaign.finals) for goal in campaign.goals
    }
    result = result_json(
        profile=campaign.loaded.profile.name,
        settings=settings,
        outcomes=outcomes,
        found=found,
        front=front,
        selections=selections,
        expectations=campaign.loaded.profile.expect,
        machine=describe_machine(campaign.facts),
        search=search,
        reference=reference_json(campaign.reference, campaign.torch.measurement if campaign.torch else None),
        gpus=campaign.loaded.profile.hardware.gpus,
        most_requests=campaign.most_requests,
    )
    result["files"] = write_profiles(campaign, result, selections, outcomes)
    if report:
        from tuning.report import write_report

        result["files"]["report.html"] = str(campaign.folder / "report.html")
        write_report(result, campaign.folder / "report.html")
    result["files"]["result.json"] = str(campaign.folder / "result.json")
    write_atomically(campaign.folder / "result.json", json.dumps(result, indent=1) + "\n")
    show(campaign.console, result)
    return result


def in_order(campaign: Campaign) -> dict[Configuration, Outcome]:
    """What has ended, in the space's order; a schedule that was derived comes last."""
    ended = campaign.study.outcomes()
    places = {cell: i for i, cell in enumerate([*campaign.space.cells, *campaign.space.infeasible])}
    return {cell: ended[cell] for cell in sorted(ended, key=lambda cell: places.get(cell, len(places)))}


def search_json(campaign: Campaign, outcomes: Mapping[Configuration, Outcome]) -> dict[str, Any]:
    """How the space was searched, what that cost, and what was left out."""
    study, screen = campaign.study, campaign.screen
    left = pruned(campaign.space, list(outcomes), screen, campaign.goal_load) if screen else {}
    measured = [each.measurement for each in outcomes.values() if each.measurement and not each.seeded_from]
    again = [m for boots in campaign.finals.values() for m in boots.values()]
    return {
        "sampler": study.sampler,
        "why": campaign.opened.why,
        "strategy": campaign.settings.search,
        "points": len(campaign.space.cells),
        "trials": study.target,
        "study": campaign.opened.name,
        "storage": shown(campaign.opened.url),
        "workers": sorted({each.worker for each in outcomes.values() if each.worker}),
        "same_engine": {a.label: cell.label for a, cell in campaign.space.same.items()},
        "pruned": {cell.label: reason for cell, reason in left.items()},
        "predicted_from_k": screen.from_k if screen else None,
        "seconds": {
            "search": _seconds(measured),
            "predictions": _seconds(campaign.probes),
            "finalists": _seconds(again),
        },
    }


def _seconds(measurements: Iterable[Measurement]) -> float:
    """What measurements took, boots and all."""
    return round(sum(sum(each.seconds.values()) for each in measurements), 1)


def write_profiles(
    campaign: Campaign,
    result: Mapping[str, Any],
    selections: Mapping[str, Selection | None],
    outcomes: Mapping[Configuration, Outcome],
) -> dict[str, str]:
    """A profile for each goal that has an answer, and best.yaml for the sweep's own."""
    machine = result["machine"]
    names = {f"best-{goal}.yaml": selection for goal, selection in selections.items()}
    names["best.yaml"] = selections[campaign.settings.goal]
    files = {}
    for name, selection in names.items():
        path = campaign.folder / name
        if selection is None:
            path.unlink(missing_ok=True)  # of an earlier conclusion
            continue
        configuration = selection.best.configuration
        header = [
            f"Written by dspark-tune sweep, {time.strftime('%Y-%m-%d')}, for {selection.goal}: "
            f"{configuration.label},",
            f"{selection.reason}. Verdict: {selection.verdict}.",
            f"Measured on {machine['hardware']}, {machine['engine']}.",
        ]
        write_best(campaign.loaded, configuration, header, path, outcomes[configuration].lowered)
        files[name] = str(path)
    return files


def show(console: Console, result: Mapping[str, Any]) -> None:
    """The result for people."""
    console.print(sweep_table(result))
    if "tpot_ms" in result["reference"]:
        torch = result["reference"]
        counts = torch["accuracy_counts"]
        console.print(
            f"compared with {torch['why']}: {counts['correct']} of {counts['questions']} right, "
            f"TPOT {torch['tpot_ms']:.2f} ms @{torch['concurrency']}",
            markup=False,
        )
    for sentence in result["unexpected"]:
        console.print(f"unexpected: {sentence}", style="yellow", markup=False)
    for cell in result["cells"]:
        if cell.get("lowered"):
            low = cell["lowered"]
            console.print(
                f"{cell['configuration']}: out of memory under load, so {low['setting']} went from "
                f"{low['before']:g} to {low['after']:g}: {low['why']}",
                style="yellow",
                markup=False,
            )
    if result["schedule"]:
        schedule = result["schedule"]
        console.print(f"{schedule['field']}: {json.dumps(schedule['rows'])}", markup=False)
    for goal, answer in result["goals"].items():
        if answer is None:
            console.print(f"{goal}: no configuration keeps what was promised", style="yellow", markup=False)
        else:
            console.print(f"{goal}: {answer['best']}, {answer['reason']}; {answer['verdict']}", markup=False)
    if not result["speculation_wins"] and result["best"]:
        console.print("best.yaml serves without DSpark", markup=False)
    for path in result["files"].values():
        console.print(f"  {path}", markup=False)


def sweep_table(result: Mapping[str, Any]) -> Table:
    """The sweep as a table for the terminal."""
    table = Table(title=f"{result['profile']}, {result['machine']['hardware']}", title_justify="left")
    loads = result["settings"]["loads"]
    for column in ("configuration", "acceptance length"):
        table.add_column(column)
    for load in loads:
        table.add_column(f"TPOT ms @{load}", justify="right")
    for column in (f"tokens/s @{max(loads)}", "accuracy", "gained/lost", "identical", ""):
        table.add_column(column, justify="right")
    for cell in result["cells"]:
        if cell["state"] != "complete":
            why = ", ".join(cell["codes"]) or cell["reason"]
            table.add_row(cell["configuration"], f"{cell['state']}: {why}".partition("\n")[0][:80])
            continue
        by_load = {load["concurrency"]: load for load in cell["loads"]}
        against = cell["against_reference"]
        verdict = "best" if cell["configuration"] == result["best"] else ""
        table.add_row(
            cell["configuration"],
            f"{cell['acceptance_length']:.3f}",
            *(f"{by_load[load]['tpot_ms']:.2f}" for load in loads),
            f"{by_load[max(loads)]['output_tokens_per_s']:.0f}",
            f"{cell['accuracy']:.3f}",
            f"{against['gained']}/{against['lost']}",
            f"{cell['identical_answers']}/{cell['accuracy_counts']['questions']}",
            verdict if cell["accurate"] else ACCURACY[cell["accuracy_verdict"]],
        )
    return table
