"""What stands in a sweep's trials: how each configuration ended, and what any worker can read from it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark_deploy.errors import InputError
from dspark_deploy.plain_json import parse_json
from tuning.accuracy import AccuracyRun
from tuning.answers import unpack
from tuning.measurement import Measurement
from tuning.samplers import make_sampler
from tuning.space import Configuration, from_params

# TPOT at the lightest load, milliseconds; output tokens/s per GPU at the heaviest.
DIRECTIONS = (StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE)
METRIC_NAMES = ["tpot_ms", "output_tokens_per_s_per_gpu"]
ACCURACY = "accuracy"
INTERRUPTED, CUT_OFF, TAKEN = "interrupted", "cut off", "another trial has this configuration"
COMPLETE, FAILED, INFEASIBLE = "complete", "failed", "infeasible"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one configuration ended: a measurement, or the reason why there is none.

    `lowered` is the setting that was lowered after the engine had run out of memory.
    """

    configuration: Configuration
    measurement: Measurement | None
    reason: str = ""
    codes: tuple[str, ...] = ()
    lowered: dict[str, Any] | None = None
    answers: AccuracyRun | None = None
    number: int = -1
    worker: str = ""
    seeded_from: str = ""

    @property
    def state(self) -> str:
        """complete, infeasible or failed."""
        return COMPLETE if self.measurement else INFEASIBLE if self.codes else FAILED


class _Stored(BaseModel):
    """What a worker writes into a trial, by its types; what others wrote beside it is left alone."""

    model_config = ConfigDict(strict=True)

    values: list[float] | None = Field(None, min_length=len(DIRECTIONS), max_length=len(DIRECTIONS))
    constraints: dict[str, float]
    configuration: dict[str, str | int | float | bool | None] = {}
    worker: str = ""
    reason: str = ""
    codes: list[str] = []
    lowered: dict[str, Any] | None = None
    measurement: str = ""
    answers: str = ""
    seeded_from: str = ""
    beat: int = 0
    duplicate_of: int | None = None


def open_study(storage: BaseStorage, name: str, identity: Mapping[str, Any], sampler: str) -> optuna.Study:
    """The study of this name, created where there is none, with its identity in it."""
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        sampler=make_sampler(sampler),
        directions=list(DIRECTIONS),
        load_if_exists=True,
    )
    if "identity" not in study.user_attrs:
        study.set_user_attr("identity", json.dumps(identity, sort_keys=True))
        with warnings.catch_warnings():  # names for a dashboard; nothing here depends on them
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(METRIC_NAMES)
    return _checked(study)


def existing_study(storage: BaseStorage, name: str) -> optuna.Study:
    """The study of this name. Raises KeyError where there is none, and InputError for a damaged one."""
    return _checked(optuna.load_study(study_name=name, storage=storage))


def _checked(study: optuna.Study) -> optuna.Study:
    """The study, if its trials are a sweep's: what samplers and fronts do with others is anybody's guess."""
    if study.directions != list(DIRECTIONS):
        raise InputError(f"study {study.study_name}: its objectives are not a sweep's")
    for trial in study.get_trials(deepcopy=False):
        try:
            if trial.state is TrialState.COMPLETE and trial.values is None:
                raise ValueError("complete without numbers")
            if any(isinstance(value, int) and value.bit_length() > 63 for value in trial.values or ()):
                raise ValueError("a number beyond 64 bits")
            _Stored.model_validate(
                {**trial.user_attrs, "values": trial.values, "constraints": trial.constraints}
            )
            configuration_of(trial)
        except (ValidationError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
            raise InputError(
                f"study {study.study_name}: trial {trial.number} is damaged ({reason}); start anew with --out"
            ) from error
    return study


def stored_identity(study: optuna.Study) -> dict[str, Any]:
    """The identity that a study was created with. Raises InputError where it has none that can be read."""
    try:
        found = parse_json(study.user_attrs["identity"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"study {study.study_name}: has no identity of a sweep in it: {error!r}") from error
    if not isinstance(found, dict):
        raise InputError(f"study {study.study_name}: its identity is damaged")
    return found


def complete_trials(study: optuna.Study) -> dict[Configuration, FrozenTrial]:
    """The first complete trial of each configuration."""
    found: dict[Configuration, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        configuration = configuration_of(trial)
        if configuration is not None and "duplicate_of" not in trial.user_attrs:
            found.setdefault(configuration, trial)
    return found


def configuration_of(trial: FrozenTrial) -> Configuration | None:
    """The configuration that a trial is about; None for one that has not been told yet."""
    params = trial.user_attrs.get("configuration")
    return from_params(params) if params else None


def complete_outcome(configuration: Configuration, trial: FrozenTrial) -> Outcome:
    stored = trial.user_attrs
    try:
        measurement = Measurement.from_json(parse_json(stored["measurement"]))
        answers = unpack(stored["answers"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"the stored measurement of trial {trial.number} is damaged ({error!r}); start anew with --out"
        ) from error
    return Outcome(
        configuration,
        measurement,
        lowered=stored.get("lowered"),
        answers=answers,
        number=trial.number,
        worker=stored.get("worker", ""),
        seeded_from=stored.get("seeded_from", ""),
    )
