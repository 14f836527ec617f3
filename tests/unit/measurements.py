"""Measurements made up for tests of what is done with measurements."""

from __future__ import annotations

from tuning.acceptance import NO_DRAFTS, Acceptance
from tuning.accuracy import AccuracyRun, Item
from tuning.load import LoadResult
from tuning.measurement import LoadMeasurement, Measurement


def load_result(concurrency: int, tpot_ms: list[float]) -> LoadResult:
    """A load level with these TPOTs; throughput follows from them."""
    mean = sum(tpot_ms) / len(tpot_ms)
    return LoadResult(
        concurrency, len(tpot_ms), 1.0, 100, concurrency * 1000 / mean, [20.0] * len(tpot_ms), list(tpot_ms)
    )


def measurement(tpot: dict[int, list[float]], k: int = 0, correct: int = 90) -> Measurement:
    """A measurement of 100 questions with the given TPOTs by load level."""
    positions = tuple(100 - 15 * j for j in range(k))
    acceptance = Acceptance(100, 100 * k, sum(positions), positions) if k else NO_DRAFTS
    loads = [LoadMeasurement(load_result(load, values), acceptance, 0.0) for load, values in tpot.items()]
    counts = {"questions": 100, "correct": correct, "truncated": 0, "unparsed": 0}
    return Measurement(loads, acceptance, counts, {"boot": 1.0})


def answers(right: int, total: int = 100) -> AccuracyRun:
    """The first `right` of `total` questions answered rightly."""
    return AccuracyRun(
        [
            Item(f"q{i}", "1", "1" if i < right else "2", i < right, "answered", f"answer {i < right}")
            for i in range(total)
        ]
    )
