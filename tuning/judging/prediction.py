"""TPOT of a smaller k before anybody serves it: acceptance from one run, step times from forced acceptance.

    dspark-tune predict --profile cpu-tiny.yaml --num-speculative-tokens 1,2,3,4

    AL(k)          1 + sum of P(accepted >= j), j = 1 to k, from one run at the largest k on real text
    T(k, batch)    mean time of a step under synthetic acceptance: the system alone, whatever the text
    TPOT(k, batch) T / (AL x delivered), delivered being the share of AL that reaches clients in that one run

A block drafter's drafts at position j can depend on how many come after it, so AL(k) is a prior and no
measurement: published curves even fall at the largest k. Use it to order what is measured, and measure the
winner; `--check` does, and reports the error.

Not covered: adaptive verification, which cuts what synthetic acceptance forces, and batches that no load had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_deploy.errors import InputError
from dspark_deploy.launch.command import speculative_config
from dspark_deploy.preflight import Facts
from dspark_deploy.preflight.synthetic import synthetic_faults
from dspark_deploy.profile.schema import Speculative
from tuning.acceptance import Acceptance


@dataclass(frozen=True, slots=True)
class Prediction:
    """One k at one load. Milliseconds; tokens per step."""

    k: int
    concurrency: int
    acceptance_length: float
    step_ms: float
    tpot_ms: float


def predicted_lengths(measured: Acceptance, ks: Sequence[int]) -> dict[int, float]:
    """Acceptance length by k, from rates by position at a larger one. Raises InputError for a k above it."""
    rates = measured.position_rates
    above = [k for k in ks if not 1 <= k <= len(rates)]
    if above:
        raise InputError(f"k = {above[0]} can't be predicted from a run with {len(rates)} positions")
    return {k: 1 + sum(rates[:k]) for k in ks}


def synthetic_flags(speculative: Speculative, facts: Facts, measured: Acceptance, k: int) -> list[str]:
    """vLLM's flags for an engine that accepts drafts as `measured` says, whatever they hold. Never for users.

    Raises InputError where that is no honest step time, as under adaptive verification.
    """
    rates = [round(rate, 6) for rate in measured.position_rates[:k]]
    # Each rate is of all drafts, so it can't rise; at few drafts a count may by chance.
    falling = [float(rate) for rate in np.minimum.accumulate(rates)]
    config = speculative_config(speculative, facts) | {
        "num_speculative_tokens": k,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": falling,
    }
    faults = synthetic_faults(config, "bench", measured_k=k)
    if faults:
        raise InputError([f"{fault.code}: {fault.message}; {fault.remedy}" for fault in faults])
    return ["--speculative-config", json.dumps(config)]


def predict(
    lengths: Mapping[int, float], steps: Mapping[tuple[int, int], float], delivered: float
) -> list[Prediction]:
    """TPOT for each (k, concurrency) whose step time is in `steps`, milliseconds."""
    return [
        Prediction(k, concurrency, lengths[k], step_ms, step_ms / (lengths[k] * delivered))
        for (k, concurrency), step_ms in sorted(steps.items())
    ]


def relative_error(predicted: float, measured: float) -> float:
    """(predicted - measured) / measured."""
    return predicted / measured - 1


def errors(
    predictions: Sequence[Prediction], measured: Mapping[tuple[int, int], tuple[float, float]]
) -> list[dict[str, Any]]:
    """Prediction beside measurement; `measured` maps (k, concurrency) to acceptance length and TPOT."""
    rows = []
    for each in predictions:
        found = measured.get((each.k, each.concurrency))
        if found is None:
            continue
        length, tpot = found
        rows.append(
            {
                "k": each.k,
                "concurrency": each.concurrency,
                "acceptance_length_measured": length,
                "acceptance_length_error": relative_error(each.acceptance_length, length),
                "tpot_ms_measured": tpot,
                "tpot_error": relative_error(each.tpot_ms, tpot),
            }
        )
    return rows
