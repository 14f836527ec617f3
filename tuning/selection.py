"""The answer of a sweep: which configurations keep their accuracy, which of them is best, how sure that is.

Accuracy comes first: a configuration whose paired loss against no speculation may exceed the margin is no
candidate, however fast. Among the rest the goal decides:

    latency      TPOT at the lightest load
    throughput   output tokens/s at the heaviest
    slo          output tokens/s at the heaviest load at which the promised percentiles are kept

Finalists that were booted again are compared boot by boot, with Student's interval over boots; without
them, prompt by prompt within the one boot that each had, and the spread between boots is in no interval.
What cannot be told apart goes to the smaller number of speculative tokens, and to fixed verification. Where
the best can't be told from no speculation, the verdict is `inconclusive`, and no speculation is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark_deploy.profile.schema import Slo
from tuning.accuracy import AccuracyRun
from tuning.judging.comparison import INCONCLUSIVE as UNTOLD
from tuning.judging.comparison import PASS
from tuning.judging.comparison import verdict as accuracy_verdict
from tuning.load import LoadResult
from tuning.measurement import Measurement
from tuning.space import REFERENCE, VERIFICATION, Configuration
from tuning.statistics import Interval, PairedComparison, compare_paired, paired_mean_difference, run_interval
from tuning.trials import Outcome

LATENCY, THROUGHPUT, SLO = "latency", "throughput", "slo"
WINS, NONE_IS_BEST, INCONCLUSIVE = "speculation wins", "no speculation is best", "inconclusive"

# Measurements of finalists by configuration, then by boot.
Finals = Mapping[Configuration, Mapping[int, Measurement]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A measured configuration with its accuracy against the reference, item by item."""

    configuration: Configuration
    measurement: Measurement
    comparison: PairedComparison
    identical: int
    accurate: bool
    accuracy_verdict: str = PASS

    def load(self, concurrency: int) -> LoadResult:
        """The result at one load level."""
        return load_of(self.measurement, concurrency)


@dataclass(frozen=True, slots=True)
class Selection:
    """The answer. `tied` are those that could not be told apart from `best` and give way to it.

    `boots` is how many boots each finalist had, 0 where nothing was booted again. `intervals` are 95 %, of
    the goal's figure by configuration: over boots, and only where there were several.
    """

    goal: str
    concurrency: int
    best: Candidate
    tied: list[Candidate]
    reason: str
    verdict: str
    boots: int = 0
    means: dict[Configuration, float] = field(default_factory=dict)
    intervals: dict[Configuration, Interval | None] = field(default_factory=dict)

    @property
    def speculation_wins(self) -> bool:
        """Whether the best configuration speculates at all."""
        return self.best.configuration.num_speculative_tokens > 0


def load_of(measurement: Measurement, concurrency: int) -> LoadResult:
    """The result at one load level."""
    return next(m.result for m in measurement.loads if m.result.concurrency == concurrency)


def candidates(
    outcomes: Mapping[Configuration, Outcome],
    answers: Mapping[Configuration, AccuracyRun],
    margin: float,
    torch: AccuracyRun | None = None,
) -> list[Candidate]:
    """Every complete configuration, compared with torch's answers, or with those of no speculation.

    Raises KeyError where neither is there.
    """
    reference = torch or answers[REFERENCE]
    found = []
    for configuration, outcome in outcomes.items():
        if outcome.measurement is None:
            continue
        run = answers[configuration]
        comparison = compare_paired(reference.correct, run.correct)
        itself = torch is None and configuration == REFERENCE
        passes = itself or comparison.not_worse_than(margin)
        kept = PASS if passes else accuracy_verdict(comparison, margin, reference.accuracy)
        identical = run.identical_to(reference)
        found.append(Candidate(configuration, outcome.measurement, comparison, identical, kept == PASS, kept))
    return found


def goal_cost(result: LoadResult, goal: str) -> float:
    """What the goal makes small: milliseconds per token, or minus output tokens per second."""
    return result.mean_tpot_ms if goal == LATENCY else -result.output_tokens_per_s


def keeps(result: LoadResult, slo: Slo) -> bool:
    """Whether a load level keeps what was promised."""
    limits = (("ttft_ms", slo.ttft_ms), ("tpot_ms", slo.tpot_ms))
    return all(
        result.percentile(name, slo.percentile) <= limit for name, limit in limits if limit is not None
    )


def field_of(
    found: Sequence[Candidate], goal: str, loads: Sequence[int], slo: Slo | None = None
) -> tuple[list[Candidate], int]:
    """The candidates that a goal chooses among, and the load at which it does; none where no one keeps it."""
    accurate = [candidate for candidate in found if candidate.accurate]
    if goal != SLO or slo is None:
        return accurate, min(loads) if goal == LATENCY else max(loads)
    for concurrency in sorted(loads, reverse=True):
        keeping = [candidate for candidate in accurate if keeps(candidate.load(concurrency), slo)]
        if keeping:
            return keeping, concurrency
    return [], max(loads)


def finalists(
    found: Sequence[Candidate], goal: str, loads: Sequence[int], slo: Slo | None, number: int
) -> list[Configuration]:
    """The configurations that are worth more boots for a goal: the best `number` of those that speculate."""
    among, concurrency = field_of(found, goal, loads, slo)
    speculating = [candidate for candidate in among if candidate.configuration.num_speculative_tokens]
    ranked = sorted(speculating, key=lambda candidate: goal_cost(candidate.load(concurrency), goal))
    return [candidate.configuration for candidate in ranked[:number]]


def select(
    found: Sequence[Candidate],
    goal: str,
    loads: Sequence[int],
    slo: Slo | None = None,
    finals: Finals | None = None,
) -> Selection | None:
    """The best accurate candidate for a goal; None where no configuration keeps what was promised."""
    among, concurrency = field_of(found, goal, loads, slo)
    again = {
        candidate.configuration: {
            boot: load_of(m, concurrency) for boot, m in finals[candidate.configuration].items()
        }
        for candidate in among
        if finals and len(finals.get(candidate.configuration, {})) > 1
    }
    if again:
        among = [candidate for candidate in among if candidate.configuration in again]
    if not among:
        return None

    def cost(candidate: Candidate) -> float:
        boots = again.get(candidate.configuration)
        if boots:
            return float(np.mean([goal_cost(result, goal) for result in boots.values()]))
        return goal_cost(candidate.load(concurrency), goal)

    def level(one: Candidate, other: Candidate) -> bool:
        if one is other:
            return True
        if again:
            return _same_over_boots(again[one.configuration], again[other.configuration], goal)
        return _same(one.load(concurrency), other.load(concurrency))

    leader = min(among, key=cost)
    tied = [candidate for candidate in among if level(candidate, leader)]
    best = min(tied, key=lambda candidate: (_size(candidate.configuration), cost(candidate)))
    tied.remove(best)
    boots = min((len(each) for each in again.values()), default=0)
    verdict, reason = (
        _verdict(best, leader, tied),
        _reason(best, abs(cost(best)), goal, concurrency, tied, boots),
    )
    untold = [
        candidate
        for candidate in found
        if candidate.accuracy_verdict == UNTOLD and goal_cost(candidate.load(concurrency), goal) < cost(best)
    ]
    if verdict == NONE_IS_BEST and untold:
        verdict = INCONCLUSIVE
        names = ", ".join(candidate.configuration.label for candidate in untold)
        questions = untold[0].comparison.questions
        reason += (
            f"; {names} looked better, and whether accuracy is kept can't be told from {questions} questions"
        )
    return Selection(
        goal,
        concurrency,
        best,
        tied,
        reason,
        verdict,
        boots,
        {candidate.configuration: abs(cost(candidate)) for candidate in among},
        {
            configuration: run_interval([abs(goal_cost(result, goal)) for result in each.values()])
            for configuration, each in again.items()
        },
    )


def _size(configuration: Configuration) -> tuple[int, int]:
    """What a tie goes by: fewer tokens, then fixed verification."""
    fixed = configuration.other(VERIFICATION) in (None, "fixed")
    return configuration.num_speculative_tokens, 0 if fixed else 1


def _verdict(best: Candidate, leader: Candidate, tied: Sequence[Candidate]) -> str:
    """Whether speculation wins, or loses, or can't be told apart from none."""
    everyone = [best, leader, *tied]
    speculating = any(each.configuration.num_speculative_tokens for each in everyone)
    without = any(not each.configuration.num_speculative_tokens for each in everyone)
    if speculating and without:
        return INCONCLUSIVE
    return WINS if speculating else NONE_IS_BEST


def _reason(
    best: Candidate, figure: float, goal: str, concurrency: int, tied: Sequence[Candidate], boots: int
) -> str:
    measure = f"TPOT {figure:.2f} ms" if goal == LATENCY else f"{figure:.0f} output tokens/s"
    reason = f"{measure} at load {concurrency}" + (f", mean of {boots} boots" if boots else "")
    if tied:
        names = ", ".join(candidate.configuration.label for candidate in tied)
        by = f"{boots} boots" if boots else "the same prompts"
        alike = all(_size(each.configuration) == _size(best.configuration) for each in tied)
        taken = "the one that looked best" if alike else "the smaller k, or fixed verification,"
        reason += f"; not told apart from {names} by {by}, so {taken} was taken"
    return reason


def _same(one: LoadResult, other: LoadResult) -> bool:
    """Whether the paired difference in TPOT over the same prompts includes zero."""
    pairs = [
        (a, b) for a, b in zip(one.tpot_ms, other.tpot_ms, strict=True) if a is not None and b is not None
    ]
    interval = paired_mean_difference([a for a, _ in pairs], [b for _, b in pairs])
    return interval.low <= 0 <= interval.high


def _same_over_boots(one: Mapping[int, LoadResult], other: Mapping[int, LoadResult], goal: str) -> bool:
    """Whether the difference over boots of the same round includes zero, or can't be known."""
    rounds = sorted(set(one) & set(other))
    interval = run_interval([goal_cost(one[r], goal) - goal_cost(other[r], goal) for r in rounds])
    return interval is None or interval.low <= 0 <= interval.high
