"""The search: what is owed, what is never measured twice, and which configuration is the answer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from dspark_deploy.errors import InputError
from dspark_deploy.profile.schema import SpaceSettings
from tests.unit.measurements import answers, measurement
from tests.unit.profiles import load
from tuning.accuracy import AccuracyRun
from tuning.measurement import Measurement
from tuning.selection import candidates, select
from tuning.space import REFERENCE, Configuration, configurations, fingerprint
from tuning.study import INTERRUPTED, Outcome, Study, open_storage

K5, K7 = Configuration(5, "greedy"), Configuration(7, "greedy")
CELLS = [REFERENCE, K7, K5]
IDENTITY = {"space": {"k": [5, 7]}, "engine": {"vllm": "0.32.0"}}


def open_study(folder: Path, cells: Iterable[Configuration] = CELLS, **changes: Any) -> Study:
    retry = changes.pop("retry_failed", False)
    storage = changes.pop("storage", None)
    return Study(folder, storage, IDENTITY | changes, list(cells), retry)


def owed(study: Study) -> list[str]:
    """Labels of what is owed; each trial is ended as interrupted, so that nothing changes."""
    labels = []
    for configuration, trial in study.owed():
        labels.append(configuration.label)
        study.fail(trial, INTERRUPTED)
    return labels


def test_configurations_start_with_the_reference_and_never_repeat() -> None:
    space = SpaceSettings(
        num_speculative_tokens=["none", 1, 3, 3], draft_sample_method=["greedy", "probabilistic"]
    )
    labels = [configuration.label for configuration in configurations(space)]
    assert labels == ["none", "k3-greedy", "k3-probabilistic", "k1-greedy", "k1-probabilistic"]
    without = SpaceSettings(num_speculative_tokens=[1], draft_sample_method=["greedy"])
    assert configurations(without)[0] == REFERENCE, "accuracy needs it, whether it was asked for or not"


def test_a_configuration_changes_the_profile(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert REFERENCE.apply(loaded).profile.speculative is None
    speculative = K7.apply(loaded).profile.speculative
    assert speculative is not None
    assert (speculative.num_speculative_tokens, speculative.draft) == (7, "/models/draft")


@pytest.mark.parametrize("storage", ["sqlite:///{}/s.db", "journal:///{}/s.log"])
def test_a_study_goes_on_where_it_stopped(tmp_path: Path, storage: str) -> None:
    url = storage.format(tmp_path)
    study = open_study(tmp_path, storage=url)
    configuration, trial = next(study.owed())
    assert configuration == REFERENCE
    study.complete(trial, measurement({1: [3.0]}), -0.05)
    again = open_study(tmp_path, storage=url)
    assert again.outcomes()[REFERENCE].measurement == measurement({1: [3.0]})
    assert owed(again) == ["k7-greedy", "k5-greedy"]


def test_failed_is_not_measured_again_unless_asked(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    for configuration, trial in study.owed():
        if configuration == K7:
            study.fail(trial, "engine died")
        else:
            study.complete(trial, measurement({1: [3.0]}), -0.05)
    again = open_study(tmp_path)
    assert owed(again) == []
    assert again.outcomes()[K7] == Outcome(K7, None, "engine died")
    assert owed(open_study(tmp_path, retry_failed=True)) == ["k7-greedy"]


def test_interrupted_is_always_owed_and_cut_off_only_once(tmp_path: Path) -> None:
    study = open_study(tmp_path, [REFERENCE])
    for _ in range(3):
        assert owed(study) == ["none"]
    next(study.owed())  # left RUNNING, as by SIGKILL
    again = open_study(tmp_path, [REFERENCE])
    assert again._study.get_trials(states=(TrialState.RUNNING,)) == []
    next(again.owed())
    third = open_study(tmp_path, [REFERENCE])
    assert owed(third) == []
    assert "cut off twice" in third.outcomes()[REFERENCE].reason


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"space": {"k": [1, 5, 7]}}, "SPACE_CHANGED"),
        ({"engine": {"vllm": "0.33.0"}}, "ENGINE_CHANGED"),
        ({"workload": {"loads": [1]}}, "WORKLOAD_CHANGED"),
    ],
)
def test_another_identity_is_refused(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    open_study(tmp_path)
    with pytest.raises(InputError, match=code) as caught:
        open_study(tmp_path, **change)
    assert "--out" in str(caught.value)


def test_optuna_honours_the_accuracy_constraint(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    tpot = {"none": 4.0, "k7-greedy": 1.0, "k5-greedy": 2.0}
    for configuration, trial in study.owed():
        violation = 0.1 if configuration == K7 else -0.01
        study.complete(trial, measurement({1: [tpot[configuration.label]]}), violation)
    assert study.pareto() == [K5], "the fastest one lost its accuracy"


@pytest.mark.parametrize(
    ("name", "text"), [("identity.json", "{"), ("identity.json", "[1]"), ("study.db", "x" * 99)]
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str) -> None:
    open_study(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=name):
        open_study(tmp_path)


def test_a_study_whose_identity_is_gone_is_refused(tmp_path: Path) -> None:
    open_study(tmp_path)
    (tmp_path / "identity.json").unlink()
    with pytest.raises(InputError, match="is gone"):
        open_study(tmp_path)


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    study = open_study(tmp_path, [REFERENCE])
    _, trial = next(study.owed())
    trial.set_user_attr("measurement", "{}")
    study._study.tell(trial, [1.0, 1.0])
    with pytest.raises(InputError, match="damaged"):
        study.outcomes()


@pytest.mark.parametrize("url", ["sqlite:///", "journal:///", "sqlite:///:memory:"])
def test_a_storage_that_keeps_nothing_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="journal:///FILE"):
        open_storage(url)


def test_storage_urls(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="journal:///FILE"):
        open_storage("mysql://host/db")


def chosen(
    measured: dict[Configuration, Measurement],
    goal: str = "latency",
    runs: dict[Configuration, AccuracyRun] | None = None,
) -> tuple[str, str]:
    outcomes = {c: Outcome(c, m) for c, m in measured.items()}
    found = candidates(outcomes, {c: answers(90) for c in measured} | (runs or {}), margin=0.05)
    selection = select(found, goal, [1, 8])
    return selection.best.configuration.label, selection.reason


def steady(light: float, heavy: float) -> dict[int, list[float]]:
    return {1: [light + 0.01 * i for i in range(20)], 8: [heavy + 0.01 * i for i in range(20)]}


def test_each_goal_has_its_own_answer() -> None:
    measured = {REFERENCE: measurement(steady(4, 5)), K5: measurement(steady(2, 6), 5)}
    assert chosen(measured)[0] == "k5-greedy"
    assert chosen(measured, "throughput")[0] == "none"


def test_a_configuration_that_loses_accuracy_is_no_candidate() -> None:
    measured = {REFERENCE: measurement(steady(4, 5)), K5: measurement(steady(2, 3), 5)}
    assert chosen(measured, runs={K5: answers(84)})[0] == "none"
    assert chosen(measured, runs={K5: answers(90)})[0] == "k5-greedy"


def test_what_cannot_be_told_apart_goes_to_the_smaller_k() -> None:
    noisy = {1: [2.0 + 0.5 * (i % 3) for i in range(20)], 8: [3.0] * 20}
    other = {1: [2.0 + 0.5 * ((i + 1) % 3) for i in range(20)], 8: [3.0] * 20}
    measured = {
        REFERENCE: measurement(steady(9, 9)),
        K7: measurement(noisy, 7),
        K5: measurement(other, 5),
    }
    label, reason = chosen(measured)
    assert label == "k5-greedy" and "not told apart from k7-greedy" in reason


def test_fingerprint_ignores_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
