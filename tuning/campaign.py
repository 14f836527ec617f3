"""A sweep from its first configuration to its last; every step is in the storage before the next begins.

study.db                     the optuna studies, unless --storage names another place
cells/LABEL/                 one engine's run directory, its load results and accuracy items
what `tuning.conclusion` writes

Several workers run the same campaign on one storage. Each measures what nobody else does, on GPUs and ports
of its own, and waits at the end of each part for those that others still measure: if one of them dies, its
configuration is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from optuna.trial import Trial
from rich.console import Console

from dspark_deploy.errors import DSparkError, EngineError, Interrupted, MeasurementError
from dspark_deploy.launch.rundir import fresh_folder, write_atomically
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from tuning.accuracy import AccuracyRun, AccuracyVoidError
from tuning.identity import identity
from tuning.measurement import Measurement, Plan, measure
from tuning.measurer import Measurer
from tuning.memory import Lowered, lowered
from tuning.opening import Options, open_sweep
from tuning.plans import asked_of, refuse_what_cannot_be_asked
from tuning.progress import Board, SweepProgress, one_line
from tuning.reference import TORCH, find_reference, too_few_questions, without_reference
from tuning.screening import (
    Screen,
    first_family,
    first_stage,
    probes,
    screen,
    second_stage,
)
from tuning.selection import LATENCY, SLO, THROUGHPUT, Candidate, Finals, candidates, finalists
from tuning.space import BOOT, REFERENCE, Configuration, Space, cut, examine
from tuning.statistics import compare_paired
from tuning.storage import StorageLost, naming_a_lost_storage
from tuning.study import Study
from tuning.tables import schedule_rows
from tuning.trials import INTERRUPTED, Outcome, open_study
from tuning.workers import Patience, beating, visible_gpus
from tuning.workload import sweep_workload

WRITES = 60  # of a measurement, over about five minutes


class Campaign:
    """One sweep as one worker runs it. `run` measures what is owed; the rest is what was found."""

    def __init__(
        self,
        loaded: LoadedProfile,
        facts: Facts,
        folder: Path,
        options: Options,
        console: Console,
        measurer: Measurer = measure,
    ) -> None:
        self.loaded, self.facts, self.folder, self.console = loaded, facts, folder, console
        self.settings = loaded.profile.sweep
        self._options, self._measurer = options, measurer
        self._workload = sweep_workload(self.settings.workload, self.settings.data)
        refuse_what_cannot_be_asked(Plan.of_sweep(self.settings), self._workload, loaded)
        self.space = cut(self.settings.space, loaded, facts)
        self.reference = find_reference(loaded, facts)
        self.torch: Outcome | None = None
        self._identity = identity(loaded, facts, self._workload.fingerprint())
        self.opened = open_sweep(
            folder,
            loaded.profile.name,
            self._identity,
            self.space,
            options,
            sampler=self.settings.sampler,
            trials=self.settings.trials,
            violation_of=self._violation,
        )
        self.study = self.opened.study
        self._board = Board()
        self.screen: Screen | None = None
        self.finals: Finals = {}
        self.probes: list[Measurement] = []
        self.first_wait_s = 0.1

    @property
    def goals(self) -> list[str]:
        """Every goal that has an answer: without limits there is no promise to keep."""
        return [LATENCY, THROUGHPUT] + ([SLO] if self.settings.slo else [])

    @property
    def goal_load(self) -> int:
        """The load at which the sweep's own goal is judged, as far as it is known beforehand."""
        loads = self.settings.loads
        return min(loads) if self.settings.goal == LATENCY else max(loads)

    @property
    def most_requests(self) -> int | None:
        """The profile's max-num-seqs, where it names one."""
        most = self.loaded.profile.engine.args.get("max-num-seqs")
        return most if isinstance(most, int) else None

    def run(self) -> None:
        """Measure all that is owed. Raises where the reference can't be measured, or the storage is lost."""
        with naming_a_lost_storage(self.opened.url):
            self._run()

    def _run(self) -> None:
        for line in self.opened.lines(self.folder):
            self.console.print(line, markup=False)
        self.console.print(f"answers are compared with: {self.reference.why}", markup=False)
        if len(self.space.cells) > 1 and (warning := too_few_questions(self.settings)):
            self.console.print(warning, style="yellow", markup=False)
        self.study.record_infeasible()
        self._need_reference()
        if self.reference.is_torch:
            self._measure_torch()
        if self.settings.search == "predicted":
            self._run_predicted()
        else:
            self._share(self.study, "search")
        self._derive_schedule()
        if self.settings.boots:
            self.finals = self._run_finals()

    def _need_reference(self) -> None:
        """Boot nothing once no speculation has failed: there is nothing to compare with."""
        if REFERENCE not in self.study.owed():
            reference = self.study.outcome(REFERENCE)
            if reference is not None and reference.measurement is None:
                raise without_reference(reference.reason)

    def _measure_torch(self) -> None:
        """The answers of torch's mHC, beside the search. Raises MeasurementError without them."""
        study = self._beside("reference", [TORCH])
        self._share(study, "torch reference")
        self.torch = study.outcome(TORCH)
        if self.torch is None or self.torch.answers is None:
            reason = self.torch.reason if self.torch else "it was not measured"
            raise MeasurementError(
                f"the torch reference has no answers: {reason}. Mend it and use --retry-failed, "
                f"or set sweep.torch_reference to false, which compares with the profile's own kernels"
            )

    def _run_predicted(self) -> None:
        """Reference and largest k, predictions, then what they leave worth measuring."""
        cells = list(self.space.cells)
        self.screen = self._screen()
        if self.screen is None:
            self.console.print("nothing was predicted, so everything is measured", markup=False)
            self.study.cells = cells
            self._share(self.study, "search")
            return
        self._extend(first_stage(self.space, self.screen, self.goal_load))
        self._share(self.study, "best predicted")
        measured = {c: o.measurement for c, o in self.study.outcomes().items() if o.measurement is not None}
        close = second_stage(self.space, self.screen, self.goal_load, measured)
        self._extend(close)
        self._share(self.study, "close in k")

    def _extend(self, cells: Sequence[Configuration]) -> None:
        self.study.cells = list(dict.fromkeys([*self.study.cells, *cells]))

    def _screen(self) -> Screen | None:
        """Measure no speculation and the largest k, boot synthetic runs, and predict every k from them."""
        wanted = probes(self.space)
        if wanted is None:
            return None
        largest, synthetic = wanted
        self.study.cells = [REFERENCE, largest]
        self._share(self.study, "reference and largest k")
        reference, base = self.study.outcome(REFERENCE), self.study.outcome(largest)
        if not (reference and reference.measurement and base and base.measurement):
            return None
        study = self._beside("screening", synthetic)
        self._share(study, "prediction", base.measurement)
        runs = {cell.num_speculative_tokens: study.outcome(cell) for cell in synthetic}
        found = {k: run.measurement for k, run in runs.items() if run and run.measurement}
        self.probes = list(found.values())
        ks = sorted(cell.num_speculative_tokens for cell in first_family(self.space))
        return screen(reference.measurement, base.measurement, found, ks, [self.goal_load])

    def _derive_schedule(self) -> None:
        """Measure the schedule by batch size that the fixed configurations make, where the space wants it."""
        if not self.space.derives_schedule:
            return
        outcomes = self.study.outcomes()
        found = self.candidates(outcomes)
        derived = schedule_rows(found, self.settings.loads, self.most_requests)
        if derived is None:
            self.console.print("schedule: one k is best at every load, so there is none", markup=False)
            return
        refused, _ = examine(derived[1], self.loaded, self.facts)
        if refused is not None:
            self.space.infeasible[derived[1]] = refused
            self.study.record_infeasible()
            return
        self.study.cells.append(derived[1])
        self._share(self.study, "schedule")

    def _run_finals(self) -> Finals:
        """Boot the finalists and the reference again, taking turns, so that a slow hour slows all alike."""
        outcomes = self.study.outcomes()
        found = self.candidates(outcomes)
        chosen: list[Configuration] = []
        for goal in self.goals:
            number = self.settings.finalists if goal == self.settings.goal else 1
            chosen += finalists(found, goal, self.settings.loads, self.settings.slo, number)
        arms = list(dict.fromkeys([REFERENCE, *chosen]))
        if len(arms) < 2:
            return {}
        rounds = range(1, self.settings.boots + 1)
        # Each round begins with another arm, so that none is always the first after a pause.
        cells = [arms[(i + r) % len(arms)].having(BOOT, r) for r in rounds for i in range(len(arms))]
        study = self._beside("finalists", cells)
        self._share(study, "finalists")
        boots: dict[Configuration, dict[int, Measurement]] = {arm: {} for arm in arms}
        for cell, outcome in study.outcomes().items():
            if outcome.measurement is not None and cell in cells:
                boots[cell.unmarked][int(dict(cell.others)[BOOT])] = outcome.measurement
        return boots

    def _beside(self, what: str, cells: list[Configuration]) -> Study:
        """A study in the same storage for measurements that are no points of the space."""
        name = f"{self.opened.name}-{what}"
        own = open_study(self.opened.storage, name, self._identity, "grid")
        space = Space(list(cells), self.space.choices)
        return Study(
            own,
            space,
            self.study.worker,
            retry_failed=self._options.retry_failed,
            alone=self.study.alone,
            pulse=self.study.pulse,
        )

    def _share(self, study: Study, phase: str, base: Measurement | None = None) -> None:
        """Measure a study's configurations until all have ended, here or at another worker."""
        total = len(study.cells) if study.target is None else min(len(study.cells), study.target)
        done = total - min(len(study.owed()), study.budget_left)
        with SweepProgress(self.console, total, done, phase, self._board) as progress:
            patience = Patience()
            while True:
                if study is self.study:
                    self._need_reference()
                claimed = study.claim()
                if claimed is not None:
                    self._run_one(study, *claimed, progress, base)
                    patience = Patience()
                elif study.busy:
                    progress.wait(study.running())
                    patience.wait()
                else:
                    return

    def _run_one(
        self,
        study: Study,
        configuration: Configuration,
        trial: Trial,
        progress: SweepProgress,
        base: Measurement | None = None,
    ) -> None:
        """Measure one configuration, and end its trial one way or the other."""
        progress.begin(configuration.label, trial.number)
        change: Lowered | None = None
        with beating(lambda count: study.beat(trial, count)):
            try:
                try:
                    found = self._attempt(configuration, progress, base, None)
                except (EngineError, MeasurementError) as error:
                    change = self._to_lower(configuration, error)
                    if change is None:
                        raise
                    progress.say(
                        f"out of memory: {change.setting} {change.before:g} -> {change.after:g}, once"
                    )
                    found = self._attempt(configuration, progress, base, change)
                violation = self._final_violation(configuration, found[1], progress)
            except (Interrupted, KeyboardInterrupt):
                study.fail(trial, INTERRUPTED)
                raise
            except DSparkError as error:
                study.fail(trial, str(error), lowered=change.as_json() if change else None)
                progress.end(f"failed: {error}")
                # There is nothing to compare with; or it is no configuration's fault.
                alone = configuration in (REFERENCE, TORCH)
                if alone or not isinstance(error, EngineError | MeasurementError):
                    raise
                return
            kept = self._keep(
                lambda: study.complete(
                    trial,
                    *found,
                    violation,
                    gpus=self.loaded.profile.hardware.gpus,
                    lowered=change.as_json() if change else None,
                )
            )
        progress.end(
            one_line(found[0]) if kept else "was taken for dead, and is another worker's now", found[0]
        )

    def _keep(self, write: Callable[[], bool]) -> bool:
        """Write a measurement down, again and again: a storage that restarts must not cost it."""
        patience = Patience(self.first_wait_s)
        for _ in range(WRITES):
            try:
                return write()
            except StorageLost as error:
                self.console.print(f"the storage does not answer ({type(error).__name__}); trying again")
                patience.wait()
        return write()

    def _attempt(
        self,
        configuration: Configuration,
        progress: SweepProgress,
        base: Measurement | None,
        change: Lowered | None,
    ) -> tuple[Measurement, AccuracyRun]:
        """One boot of a configuration, with everything that is asked of it."""
        loaded = self._with_gpus(configuration.unmarked.apply(self.loaded))
        if change is not None:
            loaded = loaded.revised(change.changes(loaded))
        folder = self._cell(configuration)
        fresh_folder(folder)
        plan, extra = asked_of(configuration, loaded, self.facts, self.goal_load, base)
        measurement, answers, ready = self._measurer(
            loaded, self.facts, plan, self._workload, folder, progress.say, extra
        )
        if configuration == self.reference.configuration and not any(answers.correct):
            raise AccuracyVoidError(
                "without speculation no question was answered rightly, so accuracy would constrain nothing"
            )
        if answers.items:
            answers.write(folder / "accuracy.jsonl")
        write_atomically(folder / "ready.json", json.dumps(ready.as_json(), indent=1) + "\n")
        return measurement, answers

    def _cell(self, configuration: Configuration) -> Path:
        return self.folder / "cells" / configuration.label

    def _with_gpus(self, loaded: LoadedProfile) -> LoadedProfile:
        """The profile on this worker's GPUs."""
        if not self._options.gpus:
            return loaded
        own = visible_gpus(loaded.profile.hardware.platform, self._options.gpus)
        return loaded.revised({"engine.env": {**loaded.profile.engine.env, **own}})

    def _to_lower(self, configuration: Configuration, error: Exception) -> Lowered | None:
        """The setting to lower after an engine ran out of memory under load; None for anything else."""
        if getattr(error, "exit_code", 1) == 5:  # it never served: the configuration does not fit
            return None
        return lowered(configuration.unmarked.apply(self.loaded), self._cell(configuration) / "engine.log")

    def _final_violation(
        self, configuration: Configuration, answers: AccuracyRun, progress: SweepProgress
    ) -> float:
        """The accuracy constraint of a configuration, once the reference's answers are there."""
        if configuration == self.reference.configuration or not answers.items:
            return -self.settings.accuracy_margin
        if self.torch is not None and self.torch.answers is not None:
            return self._violation(configuration, answers, self.torch.answers)
        patience = Patience()
        while True:
            reference = self.study.outcome(REFERENCE)
            if reference is not None and reference.answers is not None:
                return self._violation(configuration, answers, reference.answers)
            if reference is not None:
                raise without_reference(reference.reason)
            # Its worker may have died, and this one may be the last.
            trial = self.study.claim_this(REFERENCE)
            if trial is not None:
                self._run_one(self.study, REFERENCE, trial, progress)
            else:
                progress.wait(self.study.running())
                patience.wait()

    def _violation(self, configuration: Configuration, answers: AccuracyRun, reference: AccuracyRun) -> float:
        """By how much the possible loss exceeds the margin: feasible at 0 or below."""
        if configuration == self.reference.configuration:
            return -self.settings.accuracy_margin
        comparison = compare_paired(reference.correct, answers.correct)
        return -comparison.interval.low - self.settings.accuracy_margin

    def candidates(self, outcomes: Mapping[Configuration, Outcome]) -> list[Candidate]:
        """The complete configurations, compared with the reference. Raises MeasurementError without it."""
        reference = outcomes.get(REFERENCE)
        if reference is None or reference.measurement is None:
            raise without_reference(reference.reason if reference else "it was not measured")
        answers = {cell: outcome.answers for cell, outcome in outcomes.items() if outcome.answers}
        torch = self.torch.answers if self.torch else None
        return candidates(outcomes, answers, self.settings.accuracy_margin, torch)
