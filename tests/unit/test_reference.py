"""What a sweep compares answers with: torch's mHC where it can be had, so that wrong kernels are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.errors import EngineStartError, MeasurementError
from dspark_deploy.preflight.checkpoint import Checkpoint
from tests.support.stand_in import StandIn
from tests.support.sweeps import SWEEP, make, sweep
from tests.unit.facts import good_facts
from tests.unit.profiles import load
from tuning.reference import TORCH, find_reference

V4 = good_facts(model=Checkpoint("/models/target", "/models/target", config={"model_type": "deepseek_v4"}))
LABEL = "none-mhctorch-answers1"
ALL = ["none", "k5-greedy", "k3-greedy", "k1-greedy"]


@pytest.mark.parametrize(
    ("sets", "facts", "says"),
    [
        ([], good_facts(), "has no mHC"),
        (["mhc.provider=torch"], V4, "by the profile"),
        (["sweep.torch_reference=false"], V4, "sweep.torch_reference"),
        (["hardware.platform=cuda"], V4, "no choice of mHC provider"),
    ],
)
def test_where_torch_is_not_the_reference_it_says_why(
    tmp_path: Path, sets: list[str], facts: Any, says: str
) -> None:
    found = find_reference(load(tmp_path, SWEEP, sets), facts)
    assert not found.is_torch and says in found.why


def test_torch_is_measured_first_with_all_questions_and_few_requests(tmp_path: Path) -> None:
    done = sweep(tmp_path, facts=V4)
    assert done.engine.launched == [LABEL, *ALL]
    plan, _ = done.engine.asked[LABEL]
    assert (list(plan.loads), plan.requests, plan.accuracy_problems) == ([8], 16, 100)
    assert done.engine.profiles[0].profile.mhc.provider == "torch"
    assert done.engine.profiles[0].profile.speculative is None
    assert {each.profile.mhc.provider for each in done.engine.profiles[1:]} == {"auto"}
    assert done.result["reference"]["accuracy_counts"]["correct"] == 90
    assert [cell["configuration"] for cell in done.result["cells"]] == ALL, "it is no point of the space"
    assert "no speculation with torch's mHC: 90 of 100 right, TPOT" in done.text


def test_kernels_that_are_wrong_with_and_without_speculation_are_seen(tmp_path: Path) -> None:
    wrong = dict.fromkeys(ALL, 67)  # as GSM8K fell: the same for every configuration
    done = sweep(tmp_path, StandIn(wrong_for=wrong), facts=V4)
    assert done.result["best"] is None
    assert not any(cell["accurate"] for cell in done.result["cells"])
    blind = sweep(
        tmp_path, StandIn(wrong_for=wrong), name="blind", facts=V4, sets=["sweep.torch_reference=false"]
    )
    assert blind.result["best"] is not None, "compared among themselves, nothing is wrong"


def test_optuna_sees_the_constraint_against_torch(tmp_path: Path) -> None:
    done = sweep(tmp_path, StandIn(wrong_for={"none": 0, "k5-greedy": 20}), facts=V4)
    feasible = {
        trial.user_attrs["configuration"]["num_speculative_tokens"]
        for trial in done.campaign.study.study.best_trials
    }
    assert 5 not in feasible and feasible


def test_without_torchs_answers_there_is_no_sweep_and_a_way_out_is_said(tmp_path: Path) -> None:
    engine = StandIn(breaks={LABEL: [EngineStartError("no kernel"), EngineStartError("no kernel")]})
    with pytest.raises(EngineStartError):
        make(tmp_path, engine, facts=V4).run()
    with pytest.raises(MeasurementError, match=r"--retry-failed, or set sweep\.torch_reference to false"):
        make(tmp_path, engine, facts=V4).run()
    assert engine.launched == [LABEL]
    engine.breaks.clear()
    make(tmp_path, engine, facts=V4, retry_failed=True).run()
    assert engine.launched == [LABEL, LABEL, *ALL]


def test_a_sweep_that_goes_on_has_the_reference_already(tmp_path: Path) -> None:
    engine = StandIn()
    for _ in range(2):
        make(tmp_path, engine, facts=V4).run()
    assert engine.launched == [LABEL, *ALL]
    assert TORCH.label == LABEL


def test_a_sweep_is_seeded_from_a_folder_that_holds_more_studies_than_its_own(tmp_path: Path) -> None:
    make(tmp_path, StandIn(), facts=V4).run()
    engine = StandIn()
    wider = ["sweep.space.num_speculative_tokens=[none, 1, 3, 5, 7]"]
    again = make(tmp_path, engine, facts=V4, sets=wider, name="wider", seed_from=str(tmp_path / "out"))
    again.run()
    assert engine.launched == [LABEL, "k7-greedy"]
    assert "4 measurements taken over by --seed-from" in again.console.export_text()


def test_a_source_that_gives_nothing_is_said(tmp_path: Path) -> None:
    make(tmp_path, StandIn()).run()
    changed = ["sweep.prompts_per_load=8"]
    other = make(tmp_path, StandIn(), sets=changed, name="other", seed_from=str(tmp_path / "out"))
    other.run()
    assert "0 measurements taken over by --seed-from: engine, workload or" in other.console.export_text()


def test_once_no_speculation_has_failed_nothing_else_is_booted(tmp_path: Path) -> None:
    engine = StandIn(breaks={"none": [EngineStartError("no"), EngineStartError("no")]})
    with pytest.raises(EngineStartError):
        make(tmp_path, engine).run()
    with pytest.raises(MeasurementError, match=r"without speculation, no\. Mend it and use --retry-failed"):
        make(tmp_path, engine).run()
    assert engine.launched == ["none"]


def test_too_few_questions_are_said_before_a_boot_and_conclude_nothing(tmp_path: Path) -> None:
    done = sweep(tmp_path, sets=["sweep.accuracy_problems=40"])
    first = done.text.splitlines()
    assert any("40 questions can't show a loss below 5.0%" in line and "ask 73" in line for line in first[:8])
    answer = done.result["goals"]["latency"]
    assert (answer["best"], answer["verdict"]) == ("none", "inconclusive")
    assert "can't be told from 40 questions" in answer["reason"]
    assert {cell["accuracy_verdict"] for cell in done.result["cells"]} == {"pass", "inconclusive"}
    lost = sweep(tmp_path, StandIn(wrong_for=dict.fromkeys(ALL[1:], 30)), name="lost")
    assert lost.result["goals"]["latency"]["verdict"] == "no speculation is best"
    assert {cell["accuracy_verdict"] for cell in lost.result["cells"]} == {"pass", "fail"}
