"""The optuna study of a sweep: which configurations are done, which are owed, and what each gave.

A trial ends complete with numbers, infeasible with the codes of the preflight, or failed with a reason; the
last two have no values. A trial that was interrupted is owed again. One whose worker died was cut off, and
is owed once more, and only once. A configuration that has an end is never launched again.

Everything about a configuration is in its trial: measurement, answers, worker. So any worker can conclude,
with no disk in common. Workers take configurations without a coordinator: each asks for one that nobody
has, and of two that asked for the same one, the lower trial number has it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from tuning.accuracy import AccuracyRun
from tuning.answers import pack, unpack
from tuning.measurement import Measurement
from tuning.samplers import GRID, SETTLED
from tuning.space import SCHEDULE, Choice, Configuration, Space, from_params
from tuning.trials import (
    ACCURACY,
    CUT_OFF,
    INTERRUPTED,
    TAKEN,
    Outcome,
    complete_outcome,
    complete_trials,
    configuration_of,
)
from tuning.workers import Pulse, is_alive

Violation = Callable[[Configuration, AccuracyRun, AccuracyRun], float]
MOST_REPEATS = 8  # proposals of what is there already, before one is drawn from what is owed


@dataclass
class Study:
    """One study as one worker sees it.

    `target` is the number of configurations to launch in all, None being all of them; `retry_failed` owes
    those again that had failed before this worker opened the study. `alone` says that no other worker can
    be there, as in a folder that is locked: then what runs is known to be cut off.
    """

    study: optuna.Study
    space: Space
    worker: str
    sampler: str = GRID
    target: int | None = None
    retry_failed: bool = False
    alone: bool = False
    pulse: Pulse = field(default_factory=Pulse)
    seed: int = 0

    def __post_init__(self) -> None:
        self.cells = list(self.space.cells)
        self.repeats = 0
        self._random = random.Random(f"{self.worker} {self.seed}")  # noqa: S311
        self.bury_the_dead(everyone=self.alone)
        # Failures up to here are forgiven on request; those of this session count again.
        self._forgiven = len(self._trials()) if self.retry_failed else 0

    def outcomes(self) -> dict[Configuration, Outcome]:
        """The configurations that have ended, with what they gave."""
        found: dict[Configuration, Outcome] = {}
        for configuration, trials in self._by_configuration().items():
            complete = next((t for t in trials if t.state is TrialState.COMPLETE), None)
            if complete is not None:
                found[configuration] = complete_outcome(configuration, complete)
            elif (ended := self._final(configuration, trials)) is not None:
                found[configuration] = ended
        return found

    def outcome(self, configuration: Configuration) -> Outcome | None:
        """How one configuration ended, or None while it is owed or running."""
        trials = self._by_configuration().get(configuration, [])
        complete = next((t for t in trials if t.state is TrialState.COMPLETE), None)
        return complete_outcome(configuration, complete) if complete else self._final(configuration, trials)

    def _final(self, configuration: Configuration, trials: Sequence[FrozenTrial]) -> Outcome | None:
        """Why a configuration is not measured again; None while it is owed."""
        ended = [t for t in trials if t.state is TrialState.FAIL and t.number >= self._forgiven]
        reasons = [t.user_attrs.get("reason", CUT_OFF) for t in ended]
        if reasons.count(CUT_OFF) >= 2:
            return Outcome(configuration, None, "its worker died twice, by a crash or by SIGKILL")
        for trial, reason in zip(ended, reasons, strict=True):
            if reason not in (INTERRUPTED, CUT_OFF, TAKEN):
                lowered, worker = trial.user_attrs.get("lowered"), trial.user_attrs.get("worker", "")
                codes = tuple(trial.user_attrs.get("codes", ()))
                return Outcome(configuration, None, reason, codes, lowered, None, trial.number, worker)
        return None

    def owed(self) -> list[Configuration]:
        """Configurations that have no end and that nobody is measuring."""
        found = self._by_configuration()
        return [cell for cell in self.cells if not self._is_taken(cell, found.get(cell, []))]

    def _is_taken(self, configuration: Configuration, trials: Sequence[FrozenTrial]) -> bool:
        taken = (TrialState.COMPLETE, TrialState.RUNNING)
        return any(t.state in taken for t in trials) or self._final(configuration, trials) is not None

    def running(self) -> dict[Configuration, str]:
        """Configurations that live workers are measuring, and which worker."""
        return {
            configuration: trial.user_attrs.get("worker", "")
            for configuration, trials in self._by_configuration().items()
            for trial in trials
            if trial.state is TrialState.RUNNING
        }

    @property
    def busy(self) -> bool:
        """Whether any worker has a trial, one included that does not say yet which configuration it is."""
        return bool(self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    @property
    def budget_left(self) -> int:
        """How many configurations may still be launched."""
        if self.target is None:
            return len(self.cells)
        launched = sum(
            self._is_taken(cell, trials) and not any("seeded_from" in t.user_attrs for t in trials)
            for cell, trials in self._by_configuration().items()
            if cell not in self.space.infeasible
        )
        return max(self.target - launched, 0)

    def claim(self) -> tuple[Configuration, Trial] | None:
        """A configuration for this worker, with a trial that it must end; None where none is to be had.

        Nothing is launched that has an end, that runs elsewhere, or that exceeds the target.
        """
        self.bury_the_dead()
        for _ in range(len(self.cells) + MOST_REPEATS):
            owed = self.owed()
            if not owed or not self.budget_left:
                return None
            claimed = self._propose(owed)
            if claimed is not None:
                return claimed
        return None

    def claim_this(self, configuration: Configuration) -> Trial | None:
        """The trial of one configuration for this worker, or None where another has it."""
        self.bury_the_dead()
        if configuration not in self.owed():
            return None
        claimed = self._take(configuration)
        if claimed is None or claimed[0] == configuration:
            return claimed[1] if claimed else None
        self.fail(claimed[1], INTERRUPTED)  # another worker's wish came first: it is owed again
        return None

    def _propose(self, owed: Sequence[Configuration]) -> tuple[Configuration, Trial] | None:
        """One try at getting a configuration: in the grid's order, or as the sampler proposes."""
        first = self.cells[0]
        if first in owed or self.sampler == GRID:
            # Beside others, chance keeps workers from asking for the same one.
            alone = first in owed or not self.running()
            return self._take(owed[0] if alone else self._random.choice(owed))
        if self.repeats >= MOST_REPEATS:
            self.repeats = 0
            return self._take(self._random.choice(owed))
        trial = self.study.ask()
        if "configuration" in trial.user_attrs:
            return self._taken(trial)
        return self._as_proposed(trial, owed)

    def _take(self, configuration: Configuration) -> tuple[Configuration, Trial] | None:
        """Ask for this configuration. What comes may be one that another worker has asked for."""
        wish = {"configuration": configuration.params(), "worker": self.worker}
        self.study.enqueue_trial(self._coordinates(configuration), user_attrs=wish)
        return self._taken(self.study.ask())

    def _taken(self, trial: Trial) -> tuple[Configuration, Trial] | None:
        """The configuration that was asked for, unless another trial has it."""
        wished = trial.user_attrs.get("configuration")
        if wished is None:  # another worker was handed our wish, and will see to it
            self.fail(trial, TAKEN)
            return None
        configuration = from_params(wished)
        self._suggest(trial, configuration)
        return self._if_first(trial, configuration)

    def _as_proposed(self, trial: Trial, owed: Sequence[Configuration]) -> tuple[Configuration, Trial] | None:
        """What the sampler proposes, if it is owed; what is known is told to it, and not launched."""
        proposed = from_params(self._suggest(trial, None))
        configuration = self.space.same.get(proposed, proposed)
        if configuration in owed:
            return self._if_first(trial, configuration)
        self.repeats += 1
        trial.set_user_attr("configuration", configuration.params())
        original = complete_trials(self.study).get(configuration)
        if original is not None:
            trial.set_user_attr("duplicate_of", original.number)
            trial.set_constraint(ACCURACY, original.constraints.get(ACCURACY, 0.0))
            self.study.tell(trial, original.values)
        else:
            refused = self.space.infeasible.get(configuration)
            self.fail(trial, TAKEN if refused is None else refused.reason, refused.codes if refused else ())
        return None

    def _if_first(self, trial: Trial, configuration: Configuration) -> tuple[Configuration, Trial] | None:
        """The trial, marked as ours, if no other trial has this configuration; else it ends here."""
        trial.set_user_attr("worker", self.worker)
        trial.set_user_attr("configuration", configuration.params())
        others = [t for t in self._by_configuration().get(configuration, []) if t.number != trial.number]
        # A storage behind a proxy may show a trial as waiting that another worker has just taken.
        alive = (TrialState.RUNNING, TrialState.WAITING)
        earlier = any(t.state in alive and t.number < trial.number for t in others)
        complete = any(t.state is TrialState.COMPLETE for t in others)
        if earlier or complete or (self._final(configuration, others) is not None):
            self.fail(trial, TAKEN)
            return None
        return configuration, trial

    def _suggest(self, trial: Trial, configuration: Configuration | None) -> dict[str, Any]:
        """Suggest every setting that the configuration has, or, without one, that the sampler chooses.

        Samplers that model all settings together get all of them; the others only those that have a
        meaning beside the ones before.
        """
        wanted = None if configuration is None else self._coordinates(configuration)
        found: dict[str, Any] = {}
        for name, distribution in self.distributions().items():
            meaningless = found and from_params({**found, name: ""}) == from_params(found)
            if wanted is None and meaningless and self.sampler not in SETTLED:
                continue
            if wanted is None or name in wanted:
                found[name] = trial.suggest_categorical(name, distribution.choices)
        return found

    def _coordinates(self, configuration: Configuration) -> dict[str, Choice]:
        """Where a configuration stands in the space: its settings that are choices of the space."""
        alias = next((a for a, cell in self.space.same.items() if cell == configuration), configuration)
        params = alias.params()
        return {
            name: params[name]
            for name, distribution in self.distributions().items()
            if params.get(name) in distribution.choices
        }

    def distributions(self) -> dict[str, CategoricalDistribution]:
        """The space as optuna knows it; it never changes within a study."""
        return {
            name: CategoricalDistribution(proposable)
            for name, values in self.space.choices.items()
            if (proposable := [value for value in values if value != SCHEDULE])
        }

    def beat(self, trial: Trial, count: int) -> None:
        """A sign of life of the worker that has this trial."""
        trial.set_user_attr("beat", count)

    def bury_the_dead(self, everyone: bool = False) -> None:
        """End the trials whose workers have died, as cut off. They are owed once more, and only once."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            worker, beat = trial.user_attrs.get("worker", ""), trial.user_attrs.get("beat", 0)
            if worker == self.worker:
                continue
            cut_off = everyone and not is_alive(worker)
            if cut_off or self.pulse.is_dead(trial.number, worker, beat):
                try:
                    self.study.tell(trial.number, state=TrialState.FAIL)  # without a reason: it was cut off
                except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
                    continue  # it ended meanwhile, or another worker was faster

    def complete(
        self,
        trial: Trial,
        measurement: Measurement,
        answers: AccuracyRun,
        violation: float,
        *,
        gpus: int = 0,
        lowered: Mapping[str, Any] | None = None,
    ) -> bool:
        """End a trial with its numbers. `violation` above 0 makes it infeasible for optuna too.

        False where this worker had been taken for dead meanwhile, so that the trial was another's.
        """
        results = sorted((load.result for load in measurement.loads), key=lambda result: result.concurrency)
        values = [results[0].mean_tpot_ms, results[-1].output_tokens_per_s / max(gpus, 1)]
        attributes: dict[str, Any] = {
            f"tpot_ms@{result.concurrency}": round(result.mean_tpot_ms, 3) for result in results
        }
        attributes["accuracy_kept"] = violation <= 0  # for dashboards that don't know optuna's constraints
        attributes |= {"measurement": json.dumps(measurement.as_json()), "answers": pack(answers)}
        if lowered is not None:
            attributes["lowered"] = dict(lowered)
        try:
            for name, value in attributes.items():
                trial.set_user_attr(name, value)
            trial.set_constraint(ACCURACY, violation)
            self.study.tell(trial, values)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError) as error:
            stored = self._frozen(trial.number)
            if stored.state is TrialState.RUNNING:
                raise error
            # An earlier try may have come through, though its answer did not.
            return stored.state is TrialState.COMPLETE and stored.user_attrs.get("worker") == self.worker
        return True

    def fail(
        self, trial: Trial, reason: str, codes: Sequence[str] = (), lowered: Mapping[str, Any] | None = None
    ) -> None:
        """End a trial without numbers."""
        try:
            trial.set_user_attr("reason", reason)
            if codes:
                trial.set_user_attr("codes", list(codes))
            if lowered is not None:
                trial.set_user_attr("lowered", dict(lowered))
            self.study.tell(trial, state=TrialState.FAIL)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            if self._frozen(trial.number).state is TrialState.RUNNING:
                raise

    def record_infeasible(self) -> None:
        """Write down what the preflight has cut, once, as trials that were never launched."""
        known = self._by_configuration()
        for configuration, refused in self.space.infeasible.items():
            if configuration not in known:
                attributes = {"reason": refused.reason, "codes": list(refused.codes)}
                self._add(configuration, TrialState.FAIL, attributes)

    def take_over(self, source: optuna.Study, violation_of: Violation) -> int:
        """Add the complete trials of another study whose configurations are owed here; returns how many.

        `violation_of(configuration, answers, reference)` gives the accuracy constraint anew.
        """
        found = complete_trials(source)
        reference = found.get(self.cells[0])
        if reference is None:
            return 0
        taken = 0
        owed = set(self.owed())
        for configuration, trial in found.items():
            if configuration not in owed:
                continue
            kept = ("measurement", "answers", "lowered")
            attributes = {name: trial.user_attrs[name] for name in kept if name in trial.user_attrs}
            attributes["seeded_from"] = f"{source.study_name} trial {trial.number}"
            violation = violation_of(
                configuration, unpack(trial.user_attrs["answers"]), unpack(reference.user_attrs["answers"])
            )
            self._add(configuration, TrialState.COMPLETE, attributes, trial.values, violation)
            taken += 1
        return taken

    def _add(
        self,
        configuration: Configuration,
        state: TrialState,
        attributes: Mapping[str, Any],
        values: Sequence[float] | None = None,
        violation: float | None = None,
    ) -> None:
        params = self._coordinates(configuration)
        distributions: dict[str, BaseDistribution] = {
            name: each for name, each in self.distributions().items() if name in params
        }
        self.study.add_trial(
            create_trial(
                state=state,
                values=values,
                params=params,
                distributions=distributions,
                user_attrs={**attributes, "configuration": configuration.params()},
                constraints=None if violation is None else {ACCURACY: violation},
            )
        )

    def pareto(self) -> list[Configuration]:
        """Configurations on the Pareto front among those that keep accuracy, as optuna sees them."""
        front = (configuration_of(trial) for trial in self.study.best_trials)
        return list(dict.fromkeys(configuration for configuration in front if configuration))

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _frozen(self, number: int) -> FrozenTrial:
        return next(trial for trial in self._trials() if trial.number == number)

    def _by_configuration(self) -> dict[Configuration, list[FrozenTrial]]:
        """Trials by configuration, lowest number first; what only repeats another trial is left out."""
        found: dict[Configuration, list[FrozenTrial]] = {}
        for trial in self._trials():
            configuration = configuration_of(trial)
            if configuration is not None and "duplicate_of" not in trial.user_attrs:
                found.setdefault(configuration, []).append(trial)
        return found
