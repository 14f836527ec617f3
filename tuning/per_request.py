"""Acceptance request by request, from what the engine or the client saw of each.

    pooled        1 + sum(accepted) / sum(steps)                 the headline: vLLM's, SGLang's
    per request   mean over requests of 1 + accepted / steps     SpecForge's; see vllm#42508
    delivered     (sum of tokens - requests) / sum of steps      tokens that reached the client; cross-check

The engine tells a histogram per request where it serves with `--per-request-spec-decode-metrics`. Elsewhere
chunks stand for steps: a streamed chunk is one step's tokens, unless chunks ran together on the way, so that
number is believed only where it agrees with the counters (`AGREE`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuning.statistics import Interval, mean_interval, ratio_interval

AGREE = 0.02


@dataclass(frozen=True, slots=True)
class RequestSteps:
    """One request: steps that had drafts, drafts accepted in them, output tokens where they are known."""

    steps: int
    accepted: int
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Requests pooled and averaged. Lengths are tokens per step; intervals are over requests."""

    requests: int
    pooled: float
    pooled_interval: Interval
    mean: float
    mean_interval: Interval
    delivered: float | None
    past_end_share: float | None


def from_histogram(histogram: Sequence[int], tokens: int | None) -> RequestSteps:
    """`histogram[j]` steps accepted j drafts."""
    return RequestSteps(sum(histogram), sum(j * count for j, count in enumerate(histogram)), tokens)


def from_chunks(output_tokens: int, chunks: int) -> RequestSteps:
    """A streamed request: its first chunk is the prefill's token, every further one a step."""
    steps = chunks - 1
    return RequestSteps(steps, max(output_tokens - 1 - steps, 0), output_tokens)


def summarize(requests: Sequence[RequestSteps], seed: int = 0) -> PerRequest | None:
    """Pooled and per-request acceptance length; None where no request took a step."""
    counted = [request for request in requests if request.steps > 0]
    if not counted:
        return None
    steps = [request.steps for request in counted]
    emitted = [request.steps + request.accepted for request in counted]
    lengths = [1 + request.accepted / request.steps for request in counted]
    tokens = [request.tokens for request in counted if request.tokens is not None]
    known = len(tokens) == len(counted)
    accepted = sum(request.accepted for request in counted)
    cut = sum(emitted) + len(counted) - sum(tokens) if known else 0
    return PerRequest(
        requests=len(counted),
        pooled=sum(emitted) / sum(steps),
        pooled_interval=ratio_interval(emitted, steps, seed),
        mean=float(np.mean(lengths)),
        mean_interval=mean_interval(lengths, seed),
        delivered=(sum(tokens) - len(counted)) / sum(steps) if known else None,
        past_end_share=cut / accepted if known and accepted and cut >= 0 else None,
    )


def agrees(by_request: PerRequest, delivered: float | None) -> bool:
    """Whether chunks stood for steps: the client's tokens per step are the counters', to 2 %."""
    if by_request.delivered is None or not delivered:
        return False
    return abs(by_request.delivered / delivered - 1) <= AGREE
