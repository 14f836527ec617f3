"""What a sweep's numbers say beyond one winner: fronts, a schedule by batch size, crossovers, random search.

    frontier     (load, configuration) by tokens/s of a user and of a GPU: what no other beats in both
    schedule     vLLM's num_speculative_tokens_per_batch_size: the best fixed k of each load, up to it
    crossover    the lightest load from which one way to verify is better than another
    baseline     what as many draws by chance would have found, expected over all orders of the same points

Everything is computed from measured points of configurations that kept their accuracy; nothing is booted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tuning.selection import Candidate, goal_cost
from tuning.space import SCHEDULE, VERIFICATION, Configuration, schedule_choice

FIELD = "num_speculative_tokens_per_batch_size"


def frontier(found: Sequence[Candidate], loads: Sequence[int], gpus: int) -> list[dict[str, Any]]:
    """Points that no other point beats in tokens/s per user and in tokens/s per GPU; fastest user first.

    Without GPUs, the machine counts as one.
    """
    points: list[dict[str, Any]] = [
        {
            "configuration": candidate.configuration.label,
            "concurrency": load,
            "tokens_per_s_per_user": 1000 / candidate.load(load).mean_tpot_ms,
            "output_tokens_per_s_per_gpu": candidate.load(load).output_tokens_per_s / max(gpus, 1),
        }
        for candidate in found
        if candidate.accurate
        for load in loads
    ]
    points.sort(key=lambda point: (-point["tokens_per_s_per_user"], -point["output_tokens_per_s_per_gpu"]))
    front: list[dict[str, Any]] = []
    for point in points:
        if not front or point["output_tokens_per_s_per_gpu"] > front[-1]["output_tokens_per_s_per_gpu"]:
            front.append(point)
    return front


def fronts_by_load(found: Sequence[Candidate], loads: Sequence[int], gpus: int) -> dict[str, list[str]]:
    """For each load the configurations that no other beats in TPOT and output tokens/s, best TPOT first."""
    return {str(load): [point["configuration"] for point in frontier(found, [load], gpus)] for load in loads}


def is_fixed(configuration: Configuration) -> bool:
    """Whether every step verifies the same number of tokens, none included."""
    return configuration.other(VERIFICATION) in (None, "fixed")


def schedule_rows(
    found: Sequence[Candidate], loads: Sequence[int], most: int | None
) -> tuple[list[list[int]], Configuration] | None:
    """The schedule that the fixed configurations make, and the configuration that it belongs to.

    Rows are `[first, last, k]`. A load's k holds for batches up to it, since a step's cost grows with the
    batch; the heaviest load's for all above, up to `most` requests. None where one k is best at every load,
    or where no speculating configuration differs from another by k alone.
    """
    families: dict[tuple[Any, ...], list[Candidate]] = {}
    for candidate in found:
        configuration = candidate.configuration
        if candidate.accurate and is_fixed(configuration) and configuration.num_speculative_tokens:
            kept = tuple(item for item in configuration.others if item[0] != VERIFICATION)
            families.setdefault((configuration.draft_sample_method, kept), []).append(candidate)
    if not families:
        return None
    heaviest = max(loads)

    def best_at(members: Sequence[Candidate], load: int) -> Candidate:
        return min(members, key=lambda each: each.load(load).mean_tpot_ms)

    family = min(
        families.values(), key=lambda members: best_at(members, min(loads)).load(min(loads)).mean_tpot_ms
    )
    others = [c for c in found if c.accurate and c.configuration == Configuration(0)]
    rows: list[list[int]] = []
    first = 1
    for load in sorted(loads):
        k = best_at([*family, *others], load).configuration.num_speculative_tokens
        last = max(load, most or load) if load == heaviest else load
        if rows and rows[-1][2] == k:
            rows[-1][1] = last
        else:
            rows.append([first, last, k])
        first = last + 1
    if len(rows) < 2:
        return None
    highest = max(k for _, _, k in rows)
    base = next(c.configuration for c in family if c.configuration.num_speculative_tokens == highest)
    return rows, base.having(VERIFICATION, schedule_choice(rows))


def crossover(
    found: Sequence[Candidate],
    loads: Sequence[int],
    one: Callable[[Configuration], bool],
    other: Callable[[Configuration], bool],
) -> dict[str, Any] | None:
    """Where the best of `other` overtakes the best of `one` in TPOT; None where either was not measured.

    `at` is the lightest load from which on, upwards, `other` has the smaller TPOT; null where it never has.
    """
    groups = [[c for c in found if c.accurate and belongs(c.configuration)] for belongs in (one, other)]
    if not all(groups):
        return None
    rows: list[dict[str, Any]] = []
    for load in sorted(loads):
        best = [min(group, key=lambda each: each.load(load).mean_tpot_ms) for group in groups]
        rows.append(
            {
                "concurrency": load,
                "one": best[0].configuration.label,
                "one_tpot_ms": best[0].load(load).mean_tpot_ms,
                "other": best[1].configuration.label,
                "other_tpot_ms": best[1].load(load).mean_tpot_ms,
            }
        )
    ahead = [row["other_tpot_ms"] < row["one_tpot_ms"] for row in rows]
    at = next((row["concurrency"] for i, row in enumerate(rows) if all(ahead[i:])), None)
    return {"at": at, "loads": rows}


def crossovers(found: Sequence[Candidate], loads: Sequence[int]) -> dict[str, Any]:
    """The two crossovers that are asked for: fixed to adaptive, and speculation to none."""

    def fixed(configuration: Configuration) -> bool:
        return bool(configuration.num_speculative_tokens) and is_fixed(configuration)

    return {
        "fixed_to_adaptive": crossover(found, loads, fixed, lambda c: c.other(VERIFICATION) == "adaptive"),
        "fixed_to_none": crossover(found, loads, fixed, lambda c: c.num_speculative_tokens == 0),
        "fixed_to_schedule": crossover(
            found, loads, fixed, lambda c: str(c.other(VERIFICATION)).startswith(SCHEDULE)
        ),
    }


def expected_best(costs: Sequence[float], draws: int) -> float:
    """The expected smallest of `draws` values drawn without replacement, over all ways to draw them."""
    ordered, total = sorted(costs), len(costs)
    draws = min(draws, total)
    return sum(
        cost * math.comb(total - i - 1, draws - 1) / math.comb(total, draws)
        for i, cost in enumerate(ordered)
        if total - i - 1 >= draws - 1
    )


def random_baseline(
    found: Sequence[Candidate], order: Sequence[Configuration], goal: str, concurrency: int, whole: bool
) -> dict[str, Any] | None:
    """Best so far after each launch, in the order of launches, and what chance would have had by then.

    None without two candidates. Resampled from the measured points: nothing is measured for it. Where the
    sampler left points out, those it took are the better ones, so chance looks better than it is.
    """
    costs = {c.configuration: goal_cost(c.load(concurrency), goal) for c in found if c.accurate}
    steps = [costs[configuration] for configuration in order if configuration in costs]
    if len(steps) < 2:
        return None
    best = [min(steps[: n + 1]) for n in range(len(steps))]
    chance = [expected_best(steps, n + 1) for n in range(len(steps))]
    return {
        "how": "resampled from the measured points, all orders equally likely",
        "whole_space": whole,
        "found": [abs(value) for value in best],
        "by_chance": [abs(value) for value in chance],
    }
