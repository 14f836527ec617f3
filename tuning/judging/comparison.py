"""Two runs over the same questions: gained, lost, and whether the second is good enough.

    dspark-tune compare A B        dspark-tune accuracy-gate A B --margin 0.01

    p value      exact McNemar, two-sided: scipy's binomtest over the discordant pairs
    bound        the lower end of Tango's 95 % interval of the difference must lie above -margin
    pass         the bound does          fail    the loss is at least the margin, and McNemar's p below 0.05
    inconclusive neither: this many questions can't tell; or the first run has no more right than the margin,
                 so that there is nothing to lose
    null         two runs of the same build: what numerics and batching alone do to the same questions
    power        the loss that this many questions would show as significant, and show 8 times of 10

Not covered: many candidates at once; test the finalists only, or correct for their number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scipy import stats

from dspark_deploy.errors import InputError
from tuning.accuracy import AccuracyRun
from tuning.statistics import CONFIDENCE, Interval, PairedComparison, compare_paired

ALPHA = 1 - CONFIDENCE
POWER = 0.8
PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"


@dataclass(frozen=True, slots=True)
class Power:
    """What `questions` could see at a discordant rate. Losses are shares of the questions; None: none."""

    discordant: int
    smallest_significant_loss: float | None
    loss_seen_8_of_10: float | None
    equal_pair_passes: float


def nothing_to_lose(accuracy: float, margin: float) -> bool:
    """Whether the first run has so little right that no loss beyond the margin is possible."""
    return accuracy <= margin


def verdict(comparison: PairedComparison, margin: float, accuracy: float) -> str:
    """Pass, fail or inconclusive; see the module. `accuracy` is the first run's."""
    if nothing_to_lose(accuracy, margin):
        return INCONCLUSIVE
    if comparison.not_worse_than(margin):
        return PASS
    lost = comparison.difference <= -margin and comparison.p_value < ALPHA
    return FAIL if lost else INCONCLUSIVE


def conditional_interval(comparison: PairedComparison) -> Interval:
    """The exact interval given the number of discordant pairs: narrower than Tango's, shown beside it."""
    pairs = comparison.gained + comparison.lost
    if not pairs:
        return Interval(0.0, 0.0)
    found = stats.binomtest(comparison.gained, pairs).proportion_ci(CONFIDENCE)
    scale = pairs / comparison.questions
    return Interval((2 * float(found.low) - 1) * scale, (2 * float(found.high) - 1) * scale)


def _most_gained(discordant: int) -> int | None:
    """The most gained pairs at which the loss of the others is significant; None where it never is."""
    # P(X <= b) <= alpha / 2, X ~ binomial(discordant, 1/2): the two-sided exact test's lower tail.
    candidate = int(stats.binom.ppf(ALPHA / 2, discordant, 0.5))
    while candidate >= 0 and stats.binom.cdf(candidate, discordant, 0.5) > ALPHA / 2:
        candidate -= 1
    return candidate if candidate >= 0 else None


def smallest_significant_loss(questions: int, discordant: int) -> float | None:
    """The smallest net loss, as a share of the questions, that exact McNemar calls significant."""
    gained = _most_gained(discordant)
    return None if gained is None else (discordant - 2 * gained) / questions


def chance_of_significance(loss: float, questions: int, discordant: int) -> float:
    """Probability that a true `loss` becomes significant, `discordant` pairs being expected (at least)."""
    pairs = max(discordant, round(loss * questions))
    gained = _most_gained(pairs) if pairs else None
    if gained is None:
        return 0.0
    return float(stats.binom.cdf(gained, pairs, (1 - loss * questions / pairs) / 2))


def power(questions: int, discordant: int, margin: float) -> Power:
    """What this many questions can see, given how many pairs differ."""
    losses = (step / questions for step in range(1, questions + 1))
    seen = next(
        (loss for loss in losses if chance_of_significance(loss, questions, discordant) >= POWER), None
    )
    passing = 0.0
    for gained in range(discordant + 1):
        before = [True] * (discordant - gained) + [False] * gained
        after = [not right for right in before]
        rest = [True] * (questions - discordant)
        if compare_paired(before + rest, after + rest).not_worse_than(margin):
            passing += float(stats.binom.pmf(gained, discordant, 0.5))
    return Power(discordant, smallest_significant_loss(questions, discordant), seen, passing)


def paired(first: AccuracyRun, second: AccuracyRun) -> PairedComparison:
    """Second against first. Raises InputError where the questions aren't the same."""
    ours, theirs = [item.id for item in first.items], [item.id for item in second.items]
    if not ours or ours != theirs:
        raise InputError(
            f"the runs hold different questions ({len(ours)} and {len(theirs)}), so no pairs can be made; "
            f"run both with the same protocol, data and limit"
        )
    if [item.gold for item in first.items] != [item.gold for item in second.items]:
        raise InputError("the runs call different answers right; are they of the same data and protocol?")
    return compare_paired(first.correct, second.correct)


def compare(
    first: AccuracyRun,
    second: AccuracyRun,
    margin: float,
    null: tuple[AccuracyRun, AccuracyRun] | None = None,
) -> dict[str, Any]:
    """Everything `compare` says of two runs, as JSON values; `null` are two runs of one build."""
    found = paired(first, second)
    same_build = paired(*null) if null else None
    basis = same_build or found
    discordant = basis.gained + basis.lost
    return {
        "verdict": verdict(found, margin, first.accuracy),
        "margin": margin,
        "accuracy": {"before": first.accuracy, "after": second.accuracy},
        "comparison": asdict(found),
        "conditional_interval": asdict(conditional_interval(found)),
        "gained": [
            b.id for a, b in zip(first.items, second.items, strict=True) if b.correct and not a.correct
        ],
        "lost": [b.id for a, b in zip(first.items, second.items, strict=True) if a.correct and not b.correct],
        "identical_answers": first.identical_to(second),
        "null": None
        if same_build is None or null is None
        else {**asdict(same_build), "identical_answers": null[0].identical_to(null[1])},
        "power": asdict(power(found.questions, discordant, margin)),
    }
