"""A load level in numbers that can be defended: percentiles and means, each with its interval.

Intervals are 95 %: order statistics for percentiles over requests, bootstrap for means and, by whole
requests, for chunk gaps, which are no independent values. A percentile that this many requests cannot bound
has none.
They are about prompts within one boot; the spread between boots is in none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from scipy import stats

from tuning.acceptance import Acceptance
from tuning.load import QUANTILES, LoadResult, quantiles
from tuning.per_request import agrees, summarize
from tuning.statistics import CONFIDENCE, Interval, mean_interval, proportion_interval, quantile_interval

GAP_RESAMPLES = 399
MOST_GAPS = 100_000  # above it the bootstrap would take longer than it is worth: the percentiles hardly move


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and percentiles of per-request values with their intervals; empty without values."""
    if not values:
        return {}
    found: dict[str, Any] = {
        "count": len(values),
        "mean": float(np.mean(values)),
        "mean_interval": asdict(mean_interval(values)),
    }
    for q in QUANTILES:
        interval = quantile_interval(values, q)
        found[f"p{q}"] = float(np.percentile(values, q))
        found[f"p{q}_interval"] = asdict(interval) if interval else None
    return found


def gap_spread(gaps: Sequence[Sequence[float]], seed: int = 0) -> dict[str, Any]:
    """Percentiles of all gaps between chunks, with intervals from resampling whole requests."""
    arrays = [np.asarray(each, float) for each in gaps if len(each)]
    if not arrays:
        return {}
    pooled = np.concatenate(arrays)
    found: dict[str, Any] = {"count": len(pooled), "mean": float(pooled.mean()), **quantiles(list(pooled))}
    for q in QUANTILES:
        interval = _gap_interval(arrays, q, seed) if len(arrays) >= 2 and len(pooled) <= MOST_GAPS else None
        found[f"p{q}_interval"] = asdict(interval) if interval else None
    return found


def _gap_interval(arrays: list[np.ndarray], q: float, seed: int) -> Interval:
    def percentile(rows: np.ndarray) -> float:
        return float(np.percentile(np.concatenate([arrays[row] for row in rows]), q))

    interval = stats.bootstrap(
        (np.arange(len(arrays)),),
        percentile,
        vectorized=False,
        n_resamples=GAP_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(interval.low), float(interval.high))


def load_summary(result: LoadResult, gpus: int) -> dict[str, Any]:
    """What the client saw at one load level. Milliseconds, tokens per second."""
    mean_tpot = result.mean_tpot_ms
    met = result.goodput_per_s
    good = None if met is None else round(met * result.duration_s)
    return {
        "ttft_ms": spread(result.ttft_ms),
        "tpot_ms": spread(result.measured_tpot_ms),
        "chunk_gap_ms": gap_spread(result.chunk_gaps_ms),
        "tokens_per_s_per_user": 1000 / mean_tpot if mean_tpot else None,
        "output_tokens_per_s": result.output_tokens_per_s,
        "output_tokens_per_s_per_gpu": result.output_tokens_per_s / gpus if gpus else None,
        "goodput_per_s": met,
        "goodput_share_interval": (
            None if good is None else asdict(proportion_interval(good, result.requests))
        ),
        "client_lateness_ms": quantiles(result.lateness_ms),
    }


def acceptance_summary(
    counted: Acceptance, result: LoadResult, past_end: float | None, delivered: float | None, fixed_k: bool
) -> dict[str, Any]:
    """Acceptance at one load level: pooled from the counters, and per request from the chunks.

    Rates by position and per draft token are given for a fixed k only: under adaptive verification vLLM
    counts drafts that were never verified. `delivered` is the counters' tokens per step that reached clients.
    """
    if not counted.drafts:
        return {"length": 1.0}
    by_request = summarize(result.steps)
    if by_request is not None:  # chunks hold what arrived, so what was cut off can't be seen in them
        by_request = replace(by_request, past_end_share=None)
    return {
        "length": counted.length,
        "delivered_length": delivered,
        "drafts": counted.drafts,
        "per_position": counted.position_rates if fixed_k else None,
        "conditional": counted.conditional_rates if fixed_k else None,
        "draft_acceptance_rate": counted.draft_acceptance_rate if fixed_k else None,
        "past_end_share": past_end,
        "per_request": asdict(by_request) if by_request else None,
        "chunks_are_steps": by_request is not None and agrees(by_request, delivered),
    }
