"""What a sweep concludes: ties, verdicts, several boots, promises, fronts, schedules, crossovers, chance."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_deploy.errors import EngineDiedError
from dspark_deploy.profile import load_profile
from dspark_deploy.profile.schema import Slo
from tests.support.stand_in import StandIn
from tests.support.sweeps import SWEEP, sweep
from tests.unit.measurements import answers, measurement
from tests.unit.profiles import TEXT
from tuning.accuracy import AccuracyRun
from tuning.measurement import Measurement
from tuning.selection import INCONCLUSIVE, NONE_IS_BEST, WINS, Candidate, candidates, select
from tuning.space import REFERENCE, Configuration, schedule_choice
from tuning.tables import crossover, crossovers, expected_best, frontier, fronts_by_load, schedule_rows
from tuning.trials import Outcome

K1, K3, K5, K7 = (Configuration(k, "greedy") for k in (1, 3, 5, 7))
ADAPTIVE = Configuration(5, "greedy", (("verification", "adaptive"),))
FINAL = SWEEP.replace("boots: 0", "boots: 3")


def field(
    measured: dict[Configuration, Measurement], runs: dict[Configuration, AccuracyRun] | None = None
) -> list[Candidate]:
    outcomes = {c: Outcome(c, m) for c, m in measured.items()}
    return candidates(outcomes, {c: answers(90) for c in measured} | (runs or {}), margin=0.05)


def chosen(
    measured: dict[Configuration, Measurement], goal: str = "latency", **runs: Any
) -> tuple[str, str, str]:
    selection = select(field(measured, **runs), goal, [1, 8])
    assert selection is not None
    return selection.best.configuration.label, selection.reason, selection.verdict


def steady(light: float, heavy: float) -> dict[int, list[float]]:
    return {1: [light + 0.01 * i for i in range(20)], 8: [heavy + 0.01 * i for i in range(20)]}


def at(rows: dict[Configuration, Sequence[float]], loads: Sequence[int] = (1, 8)) -> list[Candidate]:
    """Candidates of constant TPOT, one value for each load."""
    return field(
        {
            c: measurement(
                {load: [value] for load, value in zip(loads, values, strict=True)}, c.num_speculative_tokens
            )
            for c, values in rows.items()
        }
    )


def test_each_goal_has_its_own_answer() -> None:
    measured = {REFERENCE: measurement(steady(4, 5)), K5: measurement(steady(2, 6), 5)}
    assert chosen(measured)[::2] == ("k5-greedy", WINS)
    assert chosen(measured, "throughput")[::2] == ("none", NONE_IS_BEST)


def test_a_configuration_that_loses_accuracy_is_no_candidate() -> None:
    measured = {REFERENCE: measurement(steady(4, 5)), K5: measurement(steady(2, 3), 5)}
    assert chosen(measured, runs={K5: answers(84)})[0] == "none"
    assert chosen(measured, runs={K5: answers(90)})[0] == "k5-greedy"


NOISY = [{1: [2.0 + 0.5 * ((i + shift) % 3) for i in range(20)], 8: [3.0] * 20} for shift in (0, 1)]


def test_what_cannot_be_told_apart_goes_to_the_smaller_k() -> None:
    measured = {
        REFERENCE: measurement(steady(9, 9)),
        K7: measurement(NOISY[0], 7),
        K5: measurement(NOISY[1], 5),
    }
    label, reason, verdict = chosen(measured)
    assert (label, verdict) == ("k5-greedy", WINS)
    assert "not told apart from k7-greedy" in reason


def test_a_tie_with_no_speculation_is_inconclusive() -> None:
    measured = {REFERENCE: measurement(NOISY[0]), K5: measurement(NOISY[1], 5)}
    assert chosen(measured)[::2] == ("none", INCONCLUSIVE)


def test_a_tie_at_one_k_is_not_said_to_be_one_of_k() -> None:
    measured = {
        REFERENCE: measurement(steady(9, 9)),
        K5: measurement(NOISY[0], 5),
        Configuration(5, "probabilistic"): measurement(NOISY[1], 5),
    }
    assert "so the one that looked best was taken" in chosen(measured)[1]


def test_a_tie_at_one_k_goes_to_fixed() -> None:
    measured = {
        REFERENCE: measurement(steady(9, 9)),
        ADAPTIVE: measurement(NOISY[0], 5),
        K5: measurement(NOISY[1], 5),
    }
    assert chosen(measured)[0] == "k5-greedy"


def boots(means: Sequence[float], k: int) -> dict[int, Measurement]:
    return {i + 1: measurement({1: [mean] * 5, 8: [mean] * 5}, k) for i, mean in enumerate(means)}


@pytest.mark.parametrize(
    ("none", "five", "best", "verdict"),
    [
        ((4.0, 4.2, 4.1), (2.0, 2.1, 2.2), "k5-greedy", WINS),
        ((2.0, 2.1, 2.2), (4.0, 4.2, 4.1), "none", NONE_IS_BEST),
        ((4.0, 4.6, 4.2), (3.9, 4.3, 4.4), "none", INCONCLUSIVE),
        # Slow hours slow both: the difference of each round is what counts.
        ((4.0, 6.0, 5.0), (3.8, 5.8, 4.81), "k5-greedy", WINS),
    ],
)
def test_boots_decide_over_prompts(
    none: Sequence[float], five: Sequence[float], best: str, verdict: str
) -> None:
    """In the one boot of the search k=5 looked best; three boots of each say what it is worth."""
    found = field({REFERENCE: measurement(steady(4, 4)), K5: measurement(steady(3, 3), 5)})
    selection = select(found, "latency", [1, 8], None, {REFERENCE: boots(none, 0), K5: boots(five, 5)})
    assert selection is not None
    assert (selection.best.configuration.label, selection.verdict) == (best, verdict)
    assert selection.boots == 3 and "mean of 3 boots" in selection.reason
    interval = selection.intervals[K5]
    assert interval is not None and interval.low < np.mean(five) < interval.high


def test_intervals_over_boots_cover_the_truth() -> None:
    """200 sweeps of an engine whose boots differ by 5 %: the interval holds the true TPOT 19 times of 20."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        draws = 3.0 * (1 + random.normal(0, 0.05, 3))
        found = field({REFERENCE: measurement(steady(9, 9)), K5: measurement(steady(3, 3), 5)})
        selection = select(
            found, "latency", [1, 8], None, {REFERENCE: boots([9, 9.1, 9.2], 0), K5: boots(draws, 5)}
        )
        assert selection is not None
        interval = selection.intervals[K5]
        assert interval is not None
        held += interval.low <= 3.0 <= interval.high
    assert 0.90 <= held / 200 <= 0.99


def test_a_promise_picks_the_heaviest_load_that_keeps_it() -> None:
    found = at({REFERENCE: (8.0, 9.0, 30.0), K3: (4.0, 6.0, 20.0), K5: (3.0, 8.0, 25.0)}, (1, 8, 32))
    loads = [1, 8, 32]
    kept = select(found, "slo", loads, Slo(tpot_ms=7.0))
    assert kept is not None and (kept.best.configuration, kept.concurrency) == (K3, 8)
    assert select(found, "slo", loads, Slo(tpot_ms=1.0)) is None
    assert select(found, "slo", loads, Slo(ttft_ms=10.0)) is None, "first tokens took 20 ms"


def test_fronts_hold_only_what_nothing_beats() -> None:
    found = at({REFERENCE: (5.0, 6.0), K3: (2.0, 4.0), K5: (1.5, 5.0)})
    assert fronts_by_load(found, [1, 8], 1) == {"1": ["k5-greedy"], "8": ["k3-greedy"]}
    points = [(p["configuration"], p["concurrency"]) for p in frontier(found, [1, 8], 1)]
    assert points == [("k5-greedy", 1), ("k3-greedy", 8)]
    halved = frontier(found, [1, 8], 2)[0]["output_tokens_per_s_per_gpu"]
    assert halved == pytest.approx(frontier(found, [1, 8], 1)[0]["output_tokens_per_s_per_gpu"] / 2)


def test_a_schedule_has_the_best_k_of_each_load() -> None:
    found = at(
        {REFERENCE: (9, 9, 9, 7), K1: (6, 5, 6, 8), K3: (4, 4, 7, 9), K5: (3, 6, 8, 10)}, (1, 4, 16, 64)
    )
    derived = schedule_rows(found, [1, 4, 16, 64], most=128)
    assert derived is not None
    rows, configuration = derived
    assert rows == [[1, 1, 5], [2, 4, 3], [5, 16, 1], [17, 128, 0]]
    assert configuration == K5.having("verification", schedule_choice(rows))


def test_there_is_no_schedule_of_one_k() -> None:
    assert schedule_rows(at({REFERENCE: (9, 9), K3: (2, 2), K5: (3, 3)}), [1, 8], None) is None
    assert schedule_rows(at({REFERENCE: (9, 9)}), [1, 8], None) is None


def test_crossovers() -> None:
    found = at({REFERENCE: (9, 9, 5), K5: (3, 6, 8), ADAPTIVE: (4, 5, 6)}, (1, 8, 32))
    both = crossovers(found, [1, 8, 32])
    assert both["fixed_to_adaptive"]["at"] == 8 and both["fixed_to_none"]["at"] == 32
    assert both["fixed_to_schedule"] is None, "none was measured"
    never = crossover(found, [1, 8], lambda c: c == K5, lambda c: c == REFERENCE)
    assert never is not None and never["at"] is None


def test_chance_is_what_enumeration_says() -> None:
    costs = [3.0, 1.0, 4.0, 1.5, 9.0]
    for draws in range(1, 6):
        every = [min(each) for each in itertools.combinations(costs, draws)]
        assert expected_best(costs, draws) == pytest.approx(np.mean(every))


def test_finalists_and_the_reference_take_turns_over_three_boots(tmp_path: Path) -> None:
    done = sweep(tmp_path, StandIn(boot_noise=0.05), FINAL)
    again = [label for label in done.engine.launched if "boot" in label]
    arms = {label.rpartition("-boot")[0] for label in again}
    assert "none" in arms and len(again) == 3 * len(arms)
    for number in (1, 2, 3):  # one of each before the next of any
        part = again[(number - 1) * len(arms) : number * len(arms)]
        assert {label.rpartition("-boot")[2] for label in part} == {str(number)}
    answer = done.result["goals"]["latency"]
    assert answer["boots"] == 3 and all(row["interval"] for row in answer["figures"])
    resumed = sweep(tmp_path, StandIn(boot_noise=0.05), FINAL)
    assert resumed.engine.launched == [] and resumed.result["goals"] == done.result["goals"]


def test_a_boot_that_fails_is_left_out(tmp_path: Path) -> None:
    engine = StandIn(boot_noise=0.05, breaks={"k3-greedy-boot2": [EngineDiedError("it died")]})
    done = sweep(tmp_path, engine, FINAL)
    assert done.result["goals"]["latency"]["boots"] == 2


def test_every_goal_has_a_profile_that_loads_and_keeps_comments(tmp_path: Path) -> None:
    text = FINAL.replace("  port: 8123", "  port: 8123   # the balancer's") + "  slo: {tpot_ms: 50}\n"
    done = sweep(tmp_path, StandIn(), text)
    out = tmp_path / "out"
    for goal, answer in done.result["goals"].items():
        file = out / f"best-{goal}.yaml"
        best = load_profile(file).profile
        k = best.speculative.num_speculative_tokens if best.speculative else 0
        assert answer["best"] == (f"k{k}-greedy" if k else "none")
        assert "# the balancer's" in file.read_text() and best.engine.port == 8123
        assert f"for {goal}" in file.read_text().partition("\n")[0]
    assert set(done.result["goals"]) == {"latency", "throughput", "slo"}
    own = load_profile(out / "best.yaml").profile
    assert own == load_profile(out / "best-latency.yaml").profile
    assert json.loads((out / "result.json").read_text()) == done.result


def test_a_promise_that_nothing_keeps_leaves_no_profile(tmp_path: Path) -> None:
    done = sweep(tmp_path, StandIn(), SWEEP + "  slo: {tpot_ms: 0.1}\n  goal: slo\n")
    assert done.result["goals"]["slo"] is None and done.result["best"] is None
    assert not (tmp_path / "out" / "best-slo.yaml").exists()
    assert "no configuration keeps what was promised" in done.text


def test_a_derived_schedule_is_measured_and_can_win(tmp_path: Path) -> None:
    text = TEXT + (
        "sweep:\n  space:\n    num_speculative_tokens: [none, 1, 5]\n    verification: [fixed, schedule]\n"
        "  loads: [1, 16]\n  boots: 0\n"
        "expect:\n  - {workload: tiny-arithmetic, num_speculative_tokens: 5, acceptance_length: [3.4, 6.0]}\n"
    )
    done = sweep(tmp_path, StandIn(token_ms=2.0), text, ["engine.args.max-num-seqs=32"])
    assert done.engine.launched[-1].startswith("k5-greedy-schedule-1to1k5-2to32k")
    assert done.result["schedule"]["rows"][0] == [1, 1, 5]
    assert done.result["schedule"]["field"] == "num_speculative_tokens_per_batch_size"
    assert done.result["unexpected"] == [], "what is expected of k=5 is not expected of a schedule"
    applied = done.engine.profiles[-1].profile.speculative
    assert applied is not None and applied.verification.kind == "schedule"
    assert sweep(tmp_path, StandIn(), text, ["engine.args.max-num-seqs=32"]).engine.launched == []
