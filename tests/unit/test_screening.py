"""Predicted search: what is booted, what is pruned and why, and that the optimum is not lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.stand_in import StandIn
from tests.support.sweeps import sweep
from tests.unit.measurements import measurement
from tests.unit.profiles import TEXT
from tuning.screening import screen, wanted_ks

WIDE = (
    TEXT
    + """\
sweep:
  space:
    num_speculative_tokens: [none, 1, 2, 3, 4, 5, 6, 7]
    draft_sample_method: [greedy, probabilistic]
  search: predicted
  loads: [1, 8]
  boots: 0
"""
)


def probabilistic_is_slower(loaded: object) -> float:
    speculative = loaded.profile.speculative  # type: ignore[attr-defined]
    return 1.1 if speculative and speculative.draft_sample_method == "probabilistic" else 1.0


@pytest.mark.parametrize("goal", ["latency", "throughput"])
@pytest.mark.parametrize("token_ms", [0.1, 0.5, 1.5, 4.0])
def test_the_optimum_survives_for_a_fraction_of_the_launches(
    tmp_path: Path, token_ms: float, goal: str
) -> None:
    """The engine's own formula gives the true optimum; the predicted search must come within 2 %."""
    engine = StandIn(token_ms=token_ms, slower=probabilistic_is_slower)
    sets = ["speculative.num_speculative_tokens=7", f"sweep.goal={goal}"]
    done = sweep(tmp_path, engine, WIDE, sets)
    full = len(done.campaign.space.cells)
    whole = [label for label in engine.launched if "probe" not in label]
    assert full == 15 and len(whole) <= 6
    first = ["none", "k7-greedy", "k1-greedy-probesynthetic", "k4-greedy-probesynthetic"]
    assert engine.launched[:4] == first, "the largest k is measured once, for its acceptance and its own sake"
    plain = engine.profiles[0]
    load = 1 if goal == "latency" else 8
    best = min(engine.tpot_ms(k, load, plain) for k in range(8))
    found = min(
        row["tpot_ms"] for cell in done.result["cells"] for row in cell["loads"] if row["concurrency"] == load
    )
    assert found <= best * 1.02 * 1.01, "1 % is the noise of the prompts"


def test_what_is_pruned_has_its_prediction_as_the_reason(tmp_path: Path) -> None:
    done = sweep(tmp_path, StandIn(token_ms=1.5), WIDE, ["speculative.num_speculative_tokens=7"])
    search = done.result["search"]
    measured = {cell["configuration"] for cell in done.result["cells"]}
    cells = {cell.label for cell in done.campaign.space.cells}
    assert set(search["pruned"]) == cells - measured
    reasons = search["pruned"].values()
    assert any("% above the best prediction" in reason for reason in reasons)
    assert any("close to the best prediction, but other settings" in reason for reason in reasons)
    assert not any(" 0% above" in reason for reason in reasons)
    assert search["strategy"] == "predicted" and search["predicted_from_k"] == 7
    assert not any("probe" in label for label in measured), "a prediction is never a result"


def test_synthetic_acceptance_is_for_step_times_alone(tmp_path: Path) -> None:
    """It never meets a question, is bound to its k, and no configuration of the search sees it."""
    engine = StandIn()
    sweep(tmp_path, engine, WIDE, ["speculative.num_speculative_tokens=7"])
    synthetic = {label: asked for label, asked in engine.asked.items() if asked[1]}
    assert set(synthetic) == {"k1-greedy-probesynthetic", "k4-greedy-probesynthetic"}
    for label, (plan, flags) in synthetic.items():
        config = json.loads(flags[flags.index("--speculative-config") + 1])
        assert plan.accuracy_problems == 0 and config["rejection_sample_method"] == "synthetic"
        assert len(config["synthetic_acceptance_rates"]) == config["num_speculative_tokens"] == int(label[1])
    assert all(plan.accuracy_problems for label, (plan, _) in engine.asked.items() if "probe" not in label)


def test_a_predicted_search_resumes_without_a_launch(tmp_path: Path) -> None:
    sets = ["speculative.num_speculative_tokens=7"]
    first = sweep(tmp_path, StandIn(), WIDE, sets)
    second = sweep(tmp_path, StandIn(), WIDE, sets)
    assert (
        second.engine.launched == [] and second.result["search"]["pruned"] == first.result["search"]["pruned"]
    )


def test_two_values_of_k_are_measured_without_prediction(tmp_path: Path) -> None:
    text = WIDE.replace("[none, 1, 2, 3, 4, 5, 6, 7]", "[none, 1, 2]")
    done = sweep(tmp_path, StandIn(), text)
    assert "everything is measured" in done.text and len(done.engine.launched) == 5


def test_without_step_times_nothing_is_pruned() -> None:
    one = measurement({1: [3.0], 8: [4.0]}, 3)
    assert screen(measurement({1: [5.0], 8: [6.0]}), one, {}, [1, 2, 3], [1, 8]) is None


def test_predicted_tpot_is_exact_where_steps_are_straight(tmp_path: Path) -> None:
    engine = StandIn(noise=0.0)
    done = sweep(tmp_path, engine, WIDE, ["speculative.num_speculative_tokens=7"])
    found = done.campaign.screen
    assert found is not None
    plain = engine.profiles[0]
    for k in range(1, 8):
        assert found.tpot_ms[k, 1] == pytest.approx(engine.tpot_ms(k, 1, plain), rel=1e-3)
    ranked = wanted_ks(found, range(1, 8), 1)
    assert ranked[0] == min(range(1, 8), key=lambda k: engine.tpot_ms(k, 1, plain))
