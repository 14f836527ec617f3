"""What acceptance by position gives away: named verdicts, each with its likely cause and what to do.

    not-monotone           a later position above an earlier one, which a prefix can't do
    too-good               nearly every draft accepted
    chain-dead-after-J     position J is fine and the next one hardly ever accepted
    past-the-block         the last positions never accepted, those before them alive
    low                    acceptance length below what is expected, or below 2

The patterns are those of public reports: vllm#41834 (k past the block), vllm#51009 (a dead chain), vllm#52536
(looped or random text), speculators#1095 (a sum over some engines only).

Not covered: rates under adaptive verification, which vLLM counts over drafts it never verified; only the
acceptance length is judged there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuning.acceptance import conditional

FEW_DRAFTS = 100
ROUNDING = 0.0015  # of two rates printed with three digits
TOO_GOOD = 0.95
ALIVE, DEAD = 0.25, 0.15


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that is wrong. `name` is for scripts, the sentences are for people."""

    name: str
    message: str
    remedy: str


def low_limit(k: int) -> float:
    """Acceptance length below which something is broken where nothing else is known: 2, less for k < 3."""
    return min(2.0, 1 + k / 3)


def judge_acceptance(
    rates: Sequence[float],
    *,
    block: int | None = None,
    expected: tuple[float, float] | None = None,
    fixed_k: bool = True,
) -> list[Verdict]:
    """Verdicts over P(accepted >= j), j = 1 to k; none where all is as it should be.

    `block` is the draft's trained width, `expected` a range of acceptance lengths for this workload. Without
    `fixed_k` only the length is judged.
    """
    k, length = len(rates), 1 + sum(rates)
    if not k:
        return []
    rising = [j for j in range(1, k) if rates[j] > rates[j - 1] + ROUNDING]
    if rising and fixed_k:  # nothing else can be read from rates that can't be
        j = rising[0]
        return [
            Verdict(
                "not-monotone",
                f"position {j + 1} is accepted more often than position {j} ({rates[j]:.3f} above "
                f"{rates[j - 1]:.3f}), which a prefix can't be",
                "an aggregation fault: sum every engine, over one stretch of time, at one k",
            )
        ]
    found = _shape(rates, block) if fixed_k else []
    if length > 1 + TOO_GOOD * k and fixed_k:
        found.append(
            Verdict(
                "too-good",
                f"acceptance length {length:.2f} of at most {k + 1}",
                "look at the answers: looped or random text, or synthetic acceptance, is accepted like this",
            )
        )
    low = expected[0] if expected else low_limit(k)
    if length < low:
        found.append(
            Verdict(
                "low",
                f"acceptance length {length:.2f} is below {low:.2f}",
                "is the draft the one trained for exactly this target, and is the workload real text?",
            )
        )
    if expected and length > expected[1]:
        found.append(
            Verdict(
                "above-expected",
                f"acceptance length {length:.2f} is above the expected {expected[1]:.2f}",
                "another workload, template or temperature than the one the range was measured with?",
            )
        )
    return found


def _shape(rates: Sequence[float], block: int | None) -> list[Verdict]:
    """A dead chain, or a tail past the trained block; where the block is known, it decides which."""
    if block is not None and 0 < block < len(rates) and rates[block - 1] > 0 and not any(rates[block:]):
        return [_past_the_block(rates, block, f" of {block}")]
    chances = conditional(rates)
    for j in range(1, len(chances)):
        if rates[j - 1] >= ALIVE and chances[j] < DEAD:
            return [
                Verdict(
                    f"chain-dead-after-{j}",
                    f"position {j} is accepted in {rates[j - 1]:.1%} of drafts, and of those only "
                    f"{chances[j]:.1%} go on to position {j + 1}",
                    "the draft sees its first token only: Markov head, shared experts or auxiliary layers of "
                    "the checkpoint were not loaded",
                )
            ]
    alive = sum(rate > 0 for rate in rates)
    if alive and len(rates) - alive > 1:
        return [_past_the_block(rates, alive, "")]
    return []


def _past_the_block(rates: Sequence[float], alive: int, known: str) -> Verdict:
    return Verdict(
        "past-the-block",
        f"positions {alive + 1} to {len(rates)} are never accepted",
        f"k lies past the trained block{known}: set num_speculative_tokens to {alive}",
    )
