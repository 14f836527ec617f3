"""The result of a sweep as plain values: what `--json` prints, result.json keeps and the report renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dspark_deploy.profile.schema import Expectation, SweepSettings
from tuning.expectations import Observed, missed
from tuning.selection import LATENCY, Candidate, Selection
from tuning.space import Configuration
from tuning.statistics import mean_interval, proportion_interval
from tuning.tables import (
    FIELD,
    crossovers,
    frontier,
    fronts_by_load,
    is_fixed,
    random_baseline,
    schedule_rows,
)
from tuning.trials import Outcome

NOTHING_KEEPS = "nothing keeps the limits"


def cell_json(candidate: Candidate, on_front: bool, outcome: Outcome, gpus: int) -> dict[str, Any]:
    """One complete configuration. Milliseconds; intervals are 95 %."""
    measurement = candidate.measurement
    counts = measurement.accuracy
    return {
        "configuration": candidate.configuration.label,
        **candidate.configuration.params(),
        "state": "complete",
        "accurate": candidate.accurate,
        "accuracy_verdict": candidate.accuracy_verdict,
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
                "output_tokens_per_s_per_gpu": load.result.output_tokens_per_s / gpus if gpus else None,
                "acceptance_length": load.acceptance.length,
                "prefix_hit_rate": load.prefix_hit_rate,
            }
            for load in measurement.loads
        ],
        "seconds": measurement.seconds,
        "lowered": outcome.lowered,
        "trial": outcome.number,
        "worker": outcome.worker,
        "seeded_from": outcome.seeded_from,
    }


def failed_json(outcome: Outcome) -> dict[str, Any]:
    """One configuration without numbers, and why: failed, or infeasible with the preflight's codes."""
    configuration = outcome.configuration
    return {
        "configuration": configuration.label,
        **configuration.params(),
        "state": outcome.state,
        "reason": outcome.reason,
        "codes": list(outcome.codes),
        "lowered": outcome.lowered,
        "trial": outcome.number,
    }


def goal_json(selection: Selection, lowered: Mapping[str, Any] | None) -> dict[str, Any]:
    """The answer for one goal. Figures are milliseconds for latency, output tokens per second otherwise."""
    return {
        "best": selection.best.configuration.label,
        "verdict": selection.verdict,
        "reason": selection.reason,
        "concurrency": selection.concurrency,
        "tied": [candidate.configuration.label for candidate in selection.tied],
        "boots": selection.boots,
        "lowered": dict(lowered) if lowered else None,
        "figures": [
            {
                "configuration": configuration.label,
                "mean": mean,
                "interval": asdict(interval)
                if (interval := selection.intervals.get(configuration))
                else None,
            }
            for configuration, mean in sorted(selection.means.items(), key=lambda item: item[0].label)
        ],
    }


def result_json(
    *,
    profile: str,
    settings: SweepSettings,
    outcomes: Mapping[Configuration, Outcome],
    found: Sequence[Candidate],
    front: Sequence[Configuration],
    selections: Mapping[str, Selection | None],
    expectations: Sequence[Expectation],
    machine: Mapping[str, str],
    search: Mapping[str, Any],
    reference: Mapping[str, Any],
    gpus: int,
    most_requests: int | None = None,
) -> dict[str, Any]:
    """The whole sweep. `selections` are the answers by goal, None where nothing keeps what was promised.

    `most_requests` is the profile's max-num-seqs, up to which a schedule has rows.
    """
    complete = {candidate.configuration: candidate for candidate in found}
    cells = [
        cell_json(complete[configuration], configuration in front, outcome, gpus)
        if configuration in complete
        else failed_json(outcome)
        for configuration, outcome in outcomes.items()
    ]
    chosen = selections[settings.goal]
    whole = search["points"] == len([o for o in outcomes.values() if not o.codes])
    order = [o.configuration for o in sorted(outcomes.values(), key=lambda o: o.number)]
    most = max(settings.loads)
    return {
        "status": "complete",
        "profile": profile,
        "machine": dict(machine),
        "settings": settings.model_dump(mode="json"),
        "best": chosen.best.configuration.label if chosen else None,
        "reason": chosen.reason if chosen else "no configuration keeps what was promised at any load",
        "verdict": chosen.verdict if chosen else NOTHING_KEEPS,
        "speculation_wins": chosen.speculation_wins if chosen else False,
        "tied": [candidate.configuration.label for candidate in chosen.tied] if chosen else [],
        "goals": {
            goal: goal_json(each, outcomes[each.best.configuration].lowered) if each else None
            for goal, each in selections.items()
        },
        "frontier": frontier(found, settings.loads, gpus),
        "fronts": fronts_by_load(found, settings.loads, gpus),
        "schedule": schedule_json(found, settings.loads, most_requests),
        "crossovers": crossovers(found, settings.loads),
        "baseline": random_baseline(
            found,
            order,
            chosen.goal if chosen else LATENCY,
            chosen.concurrency if chosen else most,
            whole,
        ),
        "search": dict(search),
        "reference": dict(reference),
        "cells": cells,
        "unexpected": unexpected(expectations, settings, found),
    }


def schedule_json(
    found: Sequence[Candidate], loads: Sequence[int], most: int | None
) -> dict[str, Any] | None:
    """vLLM's table of k by batch size, from the fixed configurations; None where one k is best everywhere."""
    derived = schedule_rows(found, loads, most)
    return {"field": FIELD, "rows": derived[0], "configuration": derived[1].label} if derived else None


def unexpected(
    expectations: Sequence[Expectation], settings: SweepSettings, found: Sequence[Candidate]
) -> list[str]:
    """What fell outside the profile's `expect`, as sentences."""
    sentences = []
    for candidate in found:
        k, measurement = candidate.configuration.num_speculative_tokens, candidate.measurement
        observed = Observed(
            label=candidate.configuration.label,
            workload=settings.workload,
            k=k,
            temperature=settings.temperature,
            thinking=False,  # prompts are sent raw
            # A schedule or adaptive verification drafts fewer than k in some steps.
            acceptance_length=measurement.acceptance.length
            if k and is_fixed(candidate.configuration)
            else None,
            accuracy=measurement.accuracy["correct"] / measurement.accuracy["questions"],
            tpot_ms={load.result.concurrency: load.result.mean_tpot_ms for load in measurement.loads},
        )
        sentences += missed(expectations, observed)
    return sentences
