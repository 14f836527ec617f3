"""The result of a sweep as plain values: what `--json` prints, result.json keeps and the report renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dspark_deploy.profile.schema import Expectation, SweepSettings
from tuning.selection import Candidate, Selection
from tuning.space import Configuration
from tuning.statistics import mean_interval, proportion_interval
from tuning.study import Outcome


def cell_json(candidate: Candidate, on_front: bool) -> dict[str, Any]:
    """One complete configuration. Milliseconds; intervals are 95 %."""
    measurement = candidate.measurement
    counts = measurement.accuracy
    return {
        "configuration": candidate.configuration.label,
        **candidate.configuration.params(),
        "state": "complete",
        "accurate": candidate.accurate,
        "pareto": on_front,
        "acceptance_length": measurement.acceptance.length,
        "acceptance_by_position": measurement.acceptance.position_rates,
        "accuracy": counts["correct"] / counts["questions"],
        "accuracy_interval": asdict(proportion_interval(counts["correct"], counts["questions"])),
        "accuracy_counts": counts,
        "accuracy_acceptance_length": measurement.accuracy_acceptance.length,
        "against_reference": asdict(candidate.comparison),
        "identical_answers": candidate.identical,
        "loads": [
            {
                "concurrency": load.result.concurrency,
                "requests": load.result.requests,
                "tpot_ms": load.result.mean_tpot_ms,
                "tpot_ms_interval": asdict(mean_interval(load.result.measured_tpot_ms)),
                "tpot_ms_p50": load.result.percentile("tpot_ms", 50),
                "tpot_ms_p99": load.result.percentile("tpot_ms", 99),
                "ttft_ms_p50": load.result.percentile("ttft_ms", 50),
                "ttft_ms_p99": load.result.percentile("ttft_ms", 99),
                "output_tokens_per_s": load.result.output_tokens_per_s,
                "acceptance_length": load.acceptance.length,
                "prefix_hit_rate": load.prefix_hit_rate,
            }
            for load in measurement.loads
        ],
        "seconds": measurement.seconds,
    }


def failed_json(outcome: Outcome) -> dict[str, Any]:
    """One configuration without numbers, and why."""
    configuration = outcome.configuration
    return {
        "configuration": configuration.label,
        **configuration.params(),
        "state": "failed",
        "reason": outcome.reason,
    }


def result_json(
    *,
    profile: str,
    settings: SweepSettings,
    outcomes: Mapping[Configuration, Outcome],
    found: Sequence[Candidate],
    front: Sequence[Configuration],
    selection: Selection,
    expectations: Sequence[Expectation],
    machine: Mapping[str, str],
) -> dict[str, Any]:
    """The whole sweep."""
    complete = {candidate.configuration: candidate for candidate in found}
    cells = [
        cell_json(complete[configuration], configuration in front)
        if configuration in complete
        else failed_json(outcome)
        for configuration, outcome in outcomes.items()
    ]
    return {
        "status": "complete",
        "profile": profile,
        "machine": dict(machine),
        "settings": settings.model_dump(mode="json"),
        "best": selection.best.configuration.label,
        "reason": selection.reason,
        "speculation_wins": selection.speculation_wins,
        "tied": [candidate.configuration.label for candidate in selection.tied],
        "cells": cells,
        "unexpected": unexpected(expectations, settings.workload, found),
    }


def unexpected(expectations: Sequence[Expectation], workload: str, found: Sequence[Candidate]) -> list[str]:
    """What fell outside the profile's `expect`, as sentences."""
    sentences = []
    for expectation in expectations:
        for candidate in found:
            k = candidate.configuration.num_speculative_tokens
            if expectation.workload != workload or expectation.num_speculative_tokens not in (None, k):
                continue
            counts = candidate.measurement.accuracy
            measured = {
                "acceptance_length": candidate.measurement.acceptance.length if k else None,
                "accuracy": counts["correct"] / counts["questions"],
            }
            for name, value in measured.items():
                limits = getattr(expectation, name)
                if limits and value is not None and not limits[0] <= value <= limits[1]:
                    sentences.append(
                        f"{candidate.configuration.label}: {name.replace('_', ' ')} {value:.3f} is outside "
                        f"the expected {limits[0]:g} to {limits[1]:g}"
                    )
    return sentences
