"""The statistics of measurements: paired accuracy, proportions, means, percentiles and their intervals.

Everything is scipy's except Tango's interval, which no library here has; scipy finds its roots.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

CONFIDENCE = 0.95
RESAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Candidate against reference on the same questions.

    `gained` were wrong in the reference and are right now; `lost` the other way round. `difference` is
    accuracy now minus accuracy before, with Tango's interval. `p_value` is exact McNemar, two-sided.
    """

    questions: int
    gained: int
    lost: int
    difference: float
    interval: Interval
    p_value: float

    def not_worse_than(self, margin: float) -> bool:
        """Non-inferiority: even the lower end of the interval is above -margin."""
        return self.interval.low > -margin


def compare_paired(reference: Sequence[bool], candidate: Sequence[bool]) -> PairedComparison:
    """Compare the same questions, in the same order. Raises ValueError where the lengths differ."""
    gained = sum(now and not before for before, now in zip(reference, candidate, strict=True))
    lost = sum(before and not now for before, now in zip(reference, candidate, strict=True))
    n = len(reference)
    p_value = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return PairedComparison(n, gained, lost, (gained - lost) / n, tango_interval(gained, lost, n), p_value)


def fewest_questions(margin: float) -> int:
    """How many questions a comparison needs to show a loss below `margin`, where not one answer is lost."""
    most = 2
    while tango_interval(0, 0, most).low <= -margin:
        most *= 2
    return 1 + bisect.bisect_left(range(1, most), True, key=lambda n: tango_interval(0, 0, n).low > -margin)


def tango_interval(gained: int, lost: int, n: int) -> Interval:
    """Score interval for a difference of paired proportions (Tango, Statistics in Medicine 17, 1998).

    The interval that conditions on the discordant pairs has no width left for how many there will be: with
    none it is [0, 0], which 100 questions cannot support. This one stays honest there: 0 of 100 discordant
    gives +-3.7 points.
    """
    z = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))
    point = (gained - lost) / n

    def score(delta: float) -> float:
        # Maximum likelihood of the smaller discordant probability under the hypothesis `delta`.
        b = -gained - lost + (2 * n - gained + lost) * delta
        c = -lost * delta * (1 - delta)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * q + delta * (1 - delta))
        return (gained - lost - n * delta) / math.sqrt(variance) if variance > 0 else 0.0

    edge = 1 - 1e-9
    low = optimize.brentq(lambda d: score(d) - z, -edge, point - 1e-12) if point > -edge else -1.0
    high = optimize.brentq(lambda d: score(d) + z, point + 1e-12, edge) if point < edge else 1.0
    return Interval(float(low), float(high))


def proportion_interval(successes: int, n: int) -> Interval:
    """Wilson's interval for one proportion."""
    found = stats.binomtest(successes, n).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(float(found.low), float(found.high))


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Bootstrap interval of a mean. A single value, or equal ones, give an interval of no width."""
    if len(set(values)) < 2:
        return Interval(values[0], values[0])
    found = stats.bootstrap(
        (np.asarray(values),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def quantile_interval(values: Sequence[float], q: float) -> Interval | None:
    """Interval of a percentile `q` (0 to 100) from order statistics; None where there are too few values.

    It makes no assumption about the distribution. The p99 has one from about 370 values on.
    """
    # scipy-stubs call the interval a float; it is scipy's named pair.
    found: Any = stats.quantile_test(np.asarray(values), p=q / 100).confidence_interval(CONFIDENCE)
    low, high = float(found.low), float(found.high)
    return None if math.isnan(low) or math.isnan(high) else Interval(low, high)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Interval:
    """Bootstrap interval of sum(numerators) / sum(denominators), resampling the pairs, such as requests."""
    pairs = (np.asarray(numerators, float), np.asarray(denominators, float))
    if len(pairs[0]) < 2 or len(set(zip(*pairs, strict=True))) < 2:
        point = float(pairs[0].sum() / pairs[1].sum())
        return Interval(point, point)
    found = stats.bootstrap(
        pairs,
        lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="BCa" if len(pairs[0]) >= 10 else "percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def run_interval(means: Sequence[float]) -> Interval | None:
    """Student's interval over the means of whole runs, such as boots; None for a single one."""
    if len(means) < 2:
        return None
    if len(set(means)) < 2:
        return Interval(means[0], means[0])
    found = stats.ttest_1samp(np.asarray(means), 0.0).confidence_interval(CONFIDENCE)
    return Interval(float(found.low), float(found.high))


def paired_mean_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Bootstrap interval of mean(first - second), over the same prompts in the same order."""
    return mean_interval([a - b for a, b in zip(first, second, strict=True)])
