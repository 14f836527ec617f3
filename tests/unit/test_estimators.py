"""Estimators on an engine whose truth is known: each is unbiased, and each interval covers as it says.

    pytest tests/unit/test_estimators.py

Coverage is counted over runs with fixed seeds, so a test passes or fails always alike. Bounds: of 60 runs a
true 95 % interval misses more than 8 with probability 0.003.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.support.shared import case_json
from tests.support.simulated_engine import SimulatedEngine
from tuning import statistics, summary
from tuning.acceptance import acceptance_between, delivered_length, difference, parse_metrics, past_end_share
from tuning.load import LoadResult, read_result, request_tpot_ms
from tuning.per_request import from_histogram, summarize
from tuning.statistics import Interval, mean_interval, quantile_interval, ratio_interval, run_interval
from tuning.summary import acceptance_summary, gap_spread, load_summary

RUNS, MOST_MISSES = 60, 8


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage needs many intervals and no third digit of any."""
    monkeypatch.setattr(statistics, "RESAMPLES", 499)
    monkeypatch.setattr(summary, "GAP_RESAMPLES", 99)


def measured(engine: SimulatedEngine, requests: int = 40, **options: float) -> LoadResult:
    return read_result(engine.bench(requests, 4, **options), 4)  # type: ignore[arg-type]


def misses(truth: float, intervals: list[Interval]) -> int:
    return sum(not one.low <= truth <= one.high for one in intervals)


def unbiased(truth: float, estimates: list[float]) -> bool:
    """Whether the mean of the estimates is within three of its standard errors."""
    return bool(abs(np.mean(estimates) - truth) < 3 * np.std(estimates, ddof=1) / len(estimates) ** 0.5)


ENGINES = [SimulatedEngine(seed=seed) for seed in range(RUNS)]
START = parse_metrics(SimulatedEngine().page())
RESULTS = [measured(engine) for engine in ENGINES]


def test_tpot_is_per_token_and_unbiased() -> None:
    truth = ENGINES[0].step_ms * ENGINES[0].expected_steps(60) / 59
    assert unbiased(truth, [result.mean_tpot_ms for result in RESULTS])
    intervals = [mean_interval(result.measured_tpot_ms) for result in RESULTS]
    assert misses(truth, intervals) <= MOST_MISSES


def test_a_chunk_gap_is_a_step_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "MOST_GAPS", 0)  # no interval is looked at here
    engine = ENGINES[0]
    means = [gap_spread(result.chunk_gaps_ms)["mean"] for result in RESULTS]
    assert unbiased(engine.step_ms, means)
    ratio = np.mean(means) / np.mean([result.mean_tpot_ms for result in RESULTS])
    assert ratio == pytest.approx(59 / engine.expected_steps(60), rel=0.02)
    assert ratio > 2, "taken for a token's time it would be wrong by the acceptance length"


def test_case_07_tpot_against_chunk_gap() -> None:
    case = case_json("07-itl-vs-tpot.json")
    request, expect = case["request"], case["expect"]
    times = [chunk["t"] for chunk in request["chunks"]]
    tokens = sum(chunk["n_tokens"] for chunk in request["chunks"])
    first = times[0] - request["request_start"]
    assert tokens == expect["output_tokens"] and first * 1000 == pytest.approx(expect["ttft_ms"])
    tpot = request_tpot_ms(times[-1] - request["request_start"], first, tokens)
    assert tpot == pytest.approx(expect["tpot_ms"])
    gaps = [(b - a) * 1000 for a, b in pairwise(times)]
    assert gap_spread([gaps])["mean"] == pytest.approx(expect["mean_itl_ms"])
    assert request_tpot_ms(first, first, 1) is None, expect["one_token_request"]


def test_percentiles_of_requests_and_their_intervals() -> None:
    many = [measured(SimulatedEngine(seed=seed), 400) for seed in range(3)]
    truth_p50 = float(np.median(np.concatenate([result.ttft_ms for result in many])))
    intervals = [quantile_interval(result.ttft_ms, 50) for result in RESULTS]
    assert all(intervals)
    assert misses(truth_p50, [one for one in intervals if one]) <= MOST_MISSES
    assert quantile_interval(RESULTS[0].ttft_ms, 99) is None, "40 requests can't bound a p99"
    p99 = quantile_interval(many[0].ttft_ms, 99)
    assert p99 is not None and p99.low < np.percentile(many[0].ttft_ms, 99) < p99.high


def test_gap_percentiles_resample_whole_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine(seed=99)
    everything = [gap for result in RESULTS for gaps in result.chunk_gaps_ms for gap in gaps]
    truth = float(np.percentile(everything, 90))
    monkeypatch.setattr(summary, "QUANTILES", (90,))
    spreads = [gap_spread(result.chunk_gaps_ms) for result in RESULTS]
    assert misses(truth, [Interval(**spread["p90_interval"]) for spread in spreads]) <= MOST_MISSES
    assert unbiased(truth, [spread["p90"] for spread in spreads])
    assert gap_spread([[], []]) == {} and engine.noise > 0


def test_pooled_acceptance_from_counters_and_from_histograms() -> None:
    truth, pooled, intervals = ENGINES[0].length, [], []
    for engine in ENGINES:
        counted = acceptance_between(START, parse_metrics(engine.page()))
        pooled.append(counted.length)
        assert counted.length == pytest.approx(1 + sum(counted.position_rates))
    for seed in range(RUNS):
        engine = SimulatedEngine(seed=1000 + seed)
        found = summarize([from_histogram(engine.request(60).histogram, 60) for _ in range(40)])
        assert found is not None
        intervals.append(found.pooled_interval)
        counted = acceptance_between(START, parse_metrics(engine.page()))
        assert found.pooled == pytest.approx(counted.length), "the same steps, counted twice"
    assert unbiased(truth, pooled)
    assert misses(truth, intervals) <= MOST_MISSES


def test_conditional_rates_are_what_the_draft_was_given() -> None:
    found = [acceptance_between(START, parse_metrics(engine.page())).conditional_rates for engine in ENGINES]
    for j, chance in enumerate(ENGINES[0].chances):
        assert unbiased(chance, [rates[j] for rates in found])


def test_pooled_and_per_request_lengths_differ_where_requests_do() -> None:
    """vllm#42508: long answers of a hard kind, short ones of an easy kind; both numbers are right."""
    easy, hard = SimulatedEngine((0.9, 0.9), seed=1), SimulatedEngine((0.2, 0.2), seed=2)
    requests = [from_histogram(easy.request(10).histogram, 10) for _ in range(300)]
    requests += [from_histogram(hard.request(100).histogram, 100) for _ in range(300)]
    found = summarize(requests)
    assert found is not None and found.mean > found.pooled + 0.3
    assert found.mean_interval.low < found.mean < found.mean_interval.high


def test_tokens_past_the_end_are_counted_apart() -> None:
    engine = SimulatedEngine((0.95, 0.95, 0.95), seed=3)
    requests = [engine.request(6) for _ in range(200)]
    counted = difference(START, parse_metrics(engine.page()))
    emitted = sum(sum((j + 1) * n for j, n in enumerate(one.histogram)) + 1 - one.tokens for one in requests)
    accepted = sum(sum(j * n for j, n in enumerate(one.histogram)) for one in requests)
    assert past_end_share(counted) == pytest.approx(emitted / accepted)
    found = summarize([from_histogram(one.histogram, one.tokens) for one in requests])
    assert found is not None and found.past_end_share == pytest.approx(emitted / accepted)
    assert found.delivered == pytest.approx(delivered_length(counted))
    assert found.delivered is not None and found.delivered < found.pooled


def test_chunks_stand_for_steps_only_where_they_agree_with_the_counters() -> None:
    engine = SimulatedEngine(seed=5)
    result = measured(engine)
    counted = difference(START, parse_metrics(engine.page()))
    acceptance = acceptance_between(START, parse_metrics(engine.page()))
    told = acceptance_summary(
        acceptance, result, past_end_share(counted), delivered_length(counted), fixed_k=True
    )
    assert told["chunks_are_steps"] is True
    assert told["per_request"]["delivered"] == pytest.approx(told["delivered_length"])
    merged = [gaps[::2] for gaps in result.chunk_gaps_ms]  # chunks that ran together on the way
    document = engine.bench(40, 4) | {"itls": merged}
    other = read_result(document, 4)
    assert acceptance_summary(acceptance, other, None, 2.6, True)["chunks_are_steps"] is False
    adaptive = acceptance_summary(acceptance, result, None, 2.6, fixed_k=False)
    assert adaptive["per_position"] is None and adaptive["draft_acceptance_rate"] is None
    assert adaptive["length"] == acceptance.length, "the length is right under adaptive verification, too"


def test_goodput_and_its_interval() -> None:
    document = SimulatedEngine(seed=6).bench(60, 4, ttft=110.0, tpot=9.0)
    result = read_result(document, 4)
    good = sum(
        t <= 110 and p is not None and p <= 9 for t, p in zip(result.ttft_ms, result.tpot_ms, strict=True)
    )
    found = load_summary(result, gpus=2)
    assert found["goodput_per_s"] == pytest.approx(good / result.duration_s) and 0 < good < 60
    assert found["goodput_share_interval"]["low"] < good / 60 < found["goodput_share_interval"]["high"]
    assert found["output_tokens_per_s_per_gpu"] == pytest.approx(result.output_tokens_per_s / 2)
    assert found["tokens_per_s_per_user"] == pytest.approx(1000 / result.mean_tpot_ms)


@pytest.mark.parametrize("late", [0.0, 35.0])
def test_lateness_of_the_client_is_what_it_was(late: float) -> None:
    result = measured(SimulatedEngine(seed=7), late_ms=late)
    assert len(result.lateness_ms) == 36
    assert result.lateness_ms == pytest.approx([late] * 36, abs=1e-6)


def test_lateness_in_an_open_loop_is_the_wait_past_arrival() -> None:
    document = SimulatedEngine(seed=8).bench(5, 4) | {"queue_times": [0.0, 0.001, 0.0, 0.2, 0.0]}
    result = read_result(document, 4, rate=2.0)
    assert result.rate == 2.0 and result.lateness_ms == pytest.approx([0, 1, 0, 200, 0])


def test_intervals_over_boots_are_students_over_means() -> None:
    random = np.random.default_rng(0)
    boots = [[float(random.normal(10, 1)) for _ in range(4)] for _ in range(400)]
    intervals = [run_interval(means) for means in boots]
    assert misses(10.0, [one for one in intervals if one]) <= 32  # of 400; 20 expected
    assert run_interval([3.0]) is None, "one boot says nothing about boots"


def test_intervals_of_equal_values_have_no_width() -> None:
    assert ratio_interval([2, 2], [1, 1]) == Interval(2.0, 2.0)
    assert ratio_interval([3], [2]) == Interval(1.5, 1.5)
