"""The optuna study of a sweep: which configurations are done, which are owed, and what each gave.

A trial is complete, or failed with a reason. A failed trial has no values. A trial that was interrupted is
owed again; one found RUNNING was cut off by a crash, and is owed once more, and only once.

The study's folder carries an identity (profile, space, workload, engine build). A different identity is
refused before any engine is booted, since numbers of two builds must not share one optimum.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from dspark_deploy.errors import InputError
from dspark_deploy.launch.rundir import write_atomically
from tuning.measurement import Measurement
from tuning.space import Configuration, fingerprint

STUDY = "dspark-sweep"
DIRECTIONS = (
    StudyDirection.MINIMIZE,
    StudyDirection.MAXIMIZE,
)  # TPOT at the lightest load; output tokens/s at the heaviest
METRIC_NAMES = ["tpot_ms", "output_tokens_per_s"]
CONSTRAINT = "accuracy"
INTERRUPTED = "interrupted"
CUT_OFF = "cut off"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one configuration ended: a measurement, or the reason why there is none."""

    configuration: Configuration
    measurement: Measurement | None
    reason: str = ""


class Study:
    """One sweep's study. Opens or creates it; raises InputError where it belongs to something else."""

    def __init__(
        self,
        folder: Path,
        storage: str | None,
        identity: dict[str, Any],
        cells: list[Configuration],
        retry_failed: bool,
    ) -> None:
        self._cells = cells
        self._check_identity(folder / "identity.json", identity)
        url = storage or f"sqlite:///{folder.resolve() / 'study.db'}"
        try:
            self._open(open_storage(url), identity)
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{url}: can't be used as storage: {reason}; start anew with --out") from error
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)  # without a reason: it was cut off
        # Failures up to here are forgiven on request; those of this session count again.
        self._forgiven = len(self._study.get_trials(deepcopy=False)) if retry_failed else 0

    def _open(self, storage: BaseStorage, identity: dict[str, Any]) -> None:
        self._study = optuna.create_study(
            storage=storage,
            study_name=f"{STUDY}-{fingerprint(identity)}",
            # Every configuration of the grid is enqueued, so the sampler never has to choose.
            sampler=optuna.samplers.RandomSampler(seed=0),
            directions=list(DIRECTIONS),
            load_if_exists=True,
        )
        with warnings.catch_warnings():  # names for a dashboard; nothing here depends on them
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.set_metric_names(METRIC_NAMES)

    @staticmethod
    def _check_identity(path: Path, identity: dict[str, Any]) -> None:
        text = json.dumps(identity, indent=1, sort_keys=True)
        if not path.exists():
            if (path.parent / "study.db").exists():
                raise InputError(
                    f"{path}: is gone, and {path.parent} has a study; start anew with --out FOLDER"
                )
            write_atomically(path, text + "\n", private=True)
            return
        try:
            stored = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: is damaged ({error}); start anew with --out FOLDER") from error
        if not isinstance(stored, dict):
            raise InputError(f"{path}: is damaged (no JSON object); start anew with --out FOLDER")
        differing = [key for key in sorted({*stored, *identity}) if stored.get(key) != identity.get(key)]
        if differing:
            raise InputError(
                [
                    f"{path.parent}: {key.upper()}_CHANGED: {difference}"
                    for key in differing
                    for difference in _differences(key, stored.get(key), identity.get(key))
                ]
                + [f"{path.parent}: start a new sweep with --out FOLDER, or go back to the earlier settings"]
            )

    def outcomes(self) -> dict[Configuration, Outcome]:
        """The configurations that have ended, with what they gave."""
        found: dict[Configuration, Outcome] = {}
        for trial in self._study.get_trials(deepcopy=False):
            configuration = _configuration(trial.params)
            if configuration is None:
                continue
            if trial.state is TrialState.COMPLETE:
                measurement = _measurement(trial)
                found[configuration] = Outcome(configuration, measurement)
            elif trial.state is TrialState.FAIL and (reason := self._final_reason(configuration)):
                found[configuration] = Outcome(configuration, None, reason)
        return found

    def _final_reason(self, configuration: Configuration) -> str:
        """Why a configuration is not measured again; empty while it is owed.

        Interrupted trials are always owed again, cut-off ones once, failed ones never.
        """
        reasons = [
            trial.user_attrs.get("reason", CUT_OFF)
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
            if _configuration(trial.params) == configuration and trial.number >= self._forgiven
        ]
        if reasons.count(CUT_OFF) >= 2:
            return "it was cut off twice, by a crash or by SIGKILL"
        return next((reason for reason in reasons if reason not in (INTERRUPTED, CUT_OFF)), "")

    def owed(self) -> Iterator[tuple[Configuration, Trial]]:
        """Each configuration still to be measured, with a trial that the caller must end."""
        done = self.outcomes()
        for configuration in self._cells:
            if configuration not in done:
                self._study.enqueue_trial(configuration.params())
                trial = self._study.ask()
                self._suggest(trial)
                yield configuration, trial

    def _suggest(self, trial: Trial) -> None:
        numbers = sorted({cell.num_speculative_tokens for cell in self._cells})
        methods = sorted({cell.draft_sample_method for cell in self._cells if cell.draft_sample_method})
        if trial.suggest_categorical("num_speculative_tokens", numbers):
            trial.suggest_categorical("draft_sample_method", methods)

    def complete(self, trial: Trial, measurement: Measurement, accuracy_violation: float) -> None:
        """End a trial with its numbers. `accuracy_violation` above 0 makes it infeasible for optuna too."""
        trial.set_user_attr("measurement", json.dumps(measurement.as_json()))
        trial.set_constraint(CONSTRAINT, accuracy_violation)
        results = sorted((load.result for load in measurement.loads), key=lambda result: result.concurrency)
        self._study.tell(trial, [results[0].mean_tpot_ms, results[-1].output_tokens_per_s])

    def fail(self, trial: Trial, reason: str) -> None:
        """End a trial without numbers."""
        trial.set_user_attr("reason", reason)
        self._study.tell(trial, state=TrialState.FAIL)

    def pareto(self) -> list[Configuration]:
        """Configurations on the Pareto front among those that keep accuracy, as optuna sees them."""
        front: list[FrozenTrial] = self._study.best_trials
        return [configuration for trial in front if (configuration := _configuration(trial.params))]


def _measurement(trial: FrozenTrial) -> Measurement:
    try:
        return Measurement.from_json(json.loads(trial.user_attrs["measurement"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"the stored measurement of trial {trial.number} is damaged ({error!r}); start anew with --out"
        ) from error


def open_storage(url: str) -> BaseStorage:
    """`sqlite:///FILE` for one machine, `journal:///FILE` for a shared disk. Raises InputError."""
    if url.startswith("journal:///") and url != "journal:///":
        path = Path(url.removeprefix("journal://"))
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    if url.startswith("sqlite:///") and url != "sqlite:///" and not url.endswith(":memory:"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        return RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
    raise InputError(f"--storage {url}: write sqlite:///FILE or journal:///FILE")


def _configuration(params: dict[str, Any]) -> Configuration | None:
    if "num_speculative_tokens" not in params:
        return None
    return Configuration(params["num_speculative_tokens"], params.get("draft_sample_method"))


def _differences(path: str, stored: Any, now: Any) -> list[str]:
    """What differs, by dotted path. Identities hold no secrets, so values may be shown."""
    if isinstance(stored, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted({*stored, *now})
            if stored.get(key) != now.get(key)
            for line in _differences(f"{path}.{key}", stored.get(key), now.get(key))
        ]
    return [f"{path} was {json.dumps(stored)[:120]} and is {json.dumps(now)[:120]}"]
