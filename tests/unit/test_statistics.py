"""The statistics: known values, and intervals that cover what they promise to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tuning.statistics import (
    Interval,
    compare_paired,
    fewest_questions,
    mean_interval,
    paired_mean_difference,
    proportion_interval,
    tango_interval,
)


def test_mcnemar_and_difference() -> None:
    reference = [True] * 22 + [False] * 14 + [True] * 64
    candidate = [False] * 22 + [True] * 14 + [True] * 64
    found = compare_paired(reference, candidate)
    assert (found.questions, found.gained, found.lost) == (100, 14, 22)
    assert found.difference == pytest.approx(-0.08)
    assert found.p_value == pytest.approx(stats.binomtest(14, 36).pvalue)


def test_equal_answers_still_leave_doubt() -> None:
    found = compare_paired([True] * 100, [True] * 100)
    assert found.p_value == 1.0
    # With no discordant pair the score interval is +-z^2 / (n + z^2).
    z2 = stats.norm.ppf(0.975) ** 2
    assert found.interval.high == pytest.approx(z2 / (100 + z2), abs=1e-6)
    assert found.interval.low == pytest.approx(-z2 / (100 + z2), abs=1e-6)
    assert found.not_worse_than(0.05) and not found.not_worse_than(0.03)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare_paired([True], [True, False])


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_tango_contains_the_estimate_and_is_symmetric(case: tuple[int, int, int]) -> None:
    n, gained, lost = case
    if gained + lost > n:
        gained, lost = n - gained, n - lost
    if gained + lost > n:
        return
    found = tango_interval(gained, lost, n)
    mirrored = tango_interval(lost, gained, n)
    point = (gained - lost) / n
    assert -1 <= found.low <= point + 1e-6 and point - 1e-6 <= found.high <= 1
    assert mirrored.low == pytest.approx(-found.high, abs=1e-6)
    assert mirrored.high == pytest.approx(-found.low, abs=1e-6)


@pytest.mark.parametrize(("p_gain", "p_loss"), [(0.01, 0.01), (0.0, 0.02), (0.05, 0.10), (0.001, 0.001)])
def test_tango_covers(p_gain: float, p_loss: float) -> None:
    """At least 93 % of the 95 % intervals hold the true difference, for few discordant pairs as well."""
    rng = np.random.default_rng(7)
    n, repeats = 200, 800
    draws = rng.multinomial(n, [p_gain, p_loss, 1 - p_gain - p_loss], size=repeats)
    cache: dict[tuple[int, int], Interval] = {}
    held = 0
    for gained, lost, _ in draws:
        key = (int(gained), int(lost))
        if key not in cache:
            cache[key] = tango_interval(*key, n)
        held += cache[key].low <= p_gain - p_loss <= cache[key].high
    assert held / repeats > 0.93


def test_wilson() -> None:
    found = proportion_interval(89, 100)
    assert (found.low, found.high) == pytest.approx((0.8137, 0.9375), abs=1e-3)


def test_mean_interval_covers_and_narrows() -> None:
    rng = np.random.default_rng(3)
    samples = [rng.gamma(4.0, 0.5, size=40).tolist() for _ in range(150)]
    held = sum(i.low <= 2.0 <= i.high for i in map(mean_interval, samples))
    assert held / len(samples) > 0.88
    assert mean_interval([3.0]) == Interval(3.0, 3.0)


def test_paired_difference_sees_what_unpaired_cannot() -> None:
    rng = np.random.default_rng(1)
    base = rng.uniform(5, 50, size=30)
    found = paired_mean_difference((base + 0.5 + rng.normal(0, 0.1, 30)).tolist(), base.tolist())
    assert 0.3 < found.low < 0.5 < found.high < 0.7 and not math.isnan(found.low)


@pytest.mark.parametrize("margin", [0.01, 0.02, 0.05, 0.1])
def test_fewest_questions_is_the_edge(margin: float) -> None:
    fewest = fewest_questions(margin)
    right = [True] * fewest
    assert compare_paired(right, right).not_worse_than(margin)
    assert not compare_paired(right[1:], right[1:]).not_worse_than(margin)
