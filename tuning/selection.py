"""From the outcomes of a sweep to its answer: which configurations keep accuracy, which of them is best.

Accuracy comes first: a configuration whose paired loss against no speculation may exceed the margin is no
candidate, however fast. Among the rest the goal decides, by the paired difference over the same prompts;
where that cannot be told from zero, the smaller number of speculative tokens wins.

What the intervals cover is the spread over prompts within one boot. The spread between boots is not in
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tuning.accuracy import AccuracyRun
from tuning.load import LoadResult
from tuning.measurement import Measurement
from tuning.space import REFERENCE, Configuration
from tuning.statistics import PairedComparison, compare_paired, paired_mean_difference
from tuning.study import Outcome


@dataclass(frozen=True, slots=True)
class Candidate:
    """A measured configuration with its accuracy against the reference, item by item."""

    configuration: Configuration
    measurement: Measurement
    comparison: PairedComparison
    identical: int
    accurate: bool

    def load(self, concurrency: int) -> LoadResult:
        """The result at one load level."""
        return next(m.result for m in self.measurement.loads if m.result.concurrency == concurrency)


@dataclass(frozen=True, slots=True)
class Selection:
    """The answer. `tied` are those that could not be told apart from `best` and have a larger k."""

    goal: str
    concurrency: int
    best: Candidate
    tied: list[Candidate]
    reason: str

    @property
    def speculation_wins(self) -> bool:
        """Whether the best configuration speculates at all."""
        return self.best.configuration != REFERENCE


def candidates(
    outcomes: Mapping[Configuration, Outcome], answers: Mapping[Configuration, AccuracyRun], margin: float
) -> list[Candidate]:
    """Every complete configuration, compared with the reference. Raises KeyError without a reference."""
    reference = answers[REFERENCE]
    found = []
    for configuration, outcome in outcomes.items():
        if outcome.measurement is None:
            continue
        run = answers[configuration]
        comparison = compare_paired(reference.correct, run.correct)
        accurate = configuration == REFERENCE or comparison.not_worse_than(margin)
        identical = run.identical_to(reference)
        found.append(Candidate(configuration, outcome.measurement, comparison, identical, accurate))
    return found


def select(found: Sequence[Candidate], goal: str, loads: Sequence[int]) -> Selection:
    """The best accurate candidate: TPOT at the lightest load, or output tokens/s at the heaviest."""
    concurrency = min(loads) if goal == "latency" else max(loads)
    accurate = [candidate for candidate in found if candidate.accurate]

    def cost(candidate: Candidate) -> float:
        result = candidate.load(concurrency)
        return result.mean_tpot_ms if goal == "latency" else -result.output_tokens_per_s

    leader = min(accurate, key=cost)
    level = [
        candidate
        for candidate in accurate
        if candidate is leader or _same(candidate.load(concurrency), leader.load(concurrency))
    ]
    best = min(level, key=lambda candidate: (candidate.configuration.num_speculative_tokens, cost(candidate)))
    tied = [candidate for candidate in level if candidate is not best]
    measure = (
        f"TPOT {best.load(concurrency).mean_tpot_ms:.2f} ms"
        if goal == "latency"
        else f"{best.load(concurrency).output_tokens_per_s:.0f} output tokens/s"
    )
    reason = f"{measure} at load {concurrency}"
    if tied:
        names = ", ".join(candidate.configuration.label for candidate in tied)
        reason += f"; not told apart from {names} by the same prompts, so the smaller k was taken"
    return Selection(goal, concurrency, best, tied, reason)


def _same(one: LoadResult, other: LoadResult) -> bool:
    """Whether the paired difference in TPOT over the same prompts includes zero."""
    pairs = [
        (a, b) for a, b in zip(one.tpot_ms, other.tpot_ms, strict=True) if a is not None and b is not None
    ]
    interval = paired_mean_difference([a for a, _ in pairs], [b for _, b in pairs])
    return interval.low <= 0 <= interval.high


def comparison_json(comparison: PairedComparison) -> dict[str, Any]:
    """A paired comparison as plain JSON values."""
    return asdict(comparison)
