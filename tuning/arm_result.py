"""An arm of a measurement as plain values: its boots, its load levels, acceptance pooled over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tuning.acceptance import NO_DRAFTS
from tuning.accuracy import AccuracyRun
from tuning.arms import Arm
from tuning.measurement import LoadMeasurement, Measurement
from tuning.per_request import summarize
from tuning.statistics import run_interval


def level_name(concurrency: int, rate: float | None) -> str:
    """`load 8` for a closed loop, `2 requests/s` for an open one."""
    return f"load {concurrency}" if rate is None else f"{rate:g} requests/s"


def _load_json(load: LoadMeasurement, boot: int) -> dict[str, Any]:
    result = load.result
    return {
        "level": level_name(result.concurrency, result.rate),
        "boot": boot,
        "concurrency": result.concurrency,
        "valid": True,
        "loop": "closed" if result.rate is None else "open, Poisson",
        "requests": result.requests,
        "prefix_hit_rate": load.prefix_hit_rate,
        "tpot_ms_by_request": result.tpot_ms,
        **load.summary,
    }


def _over_boots(loads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per level, the means of whole boots with Student's interval over them."""
    levels: dict[str, list[float]] = {}
    for load in loads:
        if load["valid"]:
            levels.setdefault(load["level"], []).append(load["tpot_ms"]["mean"])
    found = []
    for level, means in levels.items():
        interval = run_interval(means)
        found.append(
            {
                "level": level,
                "tpot_ms_by_boot": means,
                "tpot_ms": sum(means) / len(means),
                "interval": asdict(interval) if interval else None,
            }
        )
    return found


def arm_json(arm: Arm, boots: Sequence[Measurement], answers: AccuracyRun | None) -> dict[str, Any]:
    """A measured arm. Milliseconds; see docs/measuring.md for each formula."""
    loads = []
    for number, boot in enumerate(boots, 1):
        loads += [_load_json(load, number) for load in boot.loads]
        loads += [
            {
                "level": level_name(one.concurrency, one.rate),
                "boot": number,
                "valid": False,
                "reasons": one.reasons,
            }
            for one in boot.invalid
        ]
    counted = sum((boot.acceptance for boot in boots), NO_DRAFTS)
    speculative = arm.loaded.profile.speculative
    fixed = speculative is not None and speculative.verification.kind == "fixed"
    by_request = summarize(answers.steps) if answers else None
    return {
        "arm": arm.name,
        "state": "complete" if any(load["valid"] for load in loads) else "failed",
        "reason": "" if any(load["valid"] for load in loads) else "no load level was a clean measurement",
        "mhc_provider": arm.loaded.profile.mhc.provider,
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else 0,
        "loads": loads,
        "over_boots": _over_boots(loads),
        "acceptance": {
            "length": counted.length,
            "drafts": counted.drafts,
            "per_position": counted.position_rates if fixed else None,
            "conditional": counted.conditional_rates if fixed else None,
            "draft_acceptance_rate": counted.draft_acceptance_rate if fixed else None,
        }
        if counted.drafts
        else None,
        "accuracy": boots[0].accuracy,
        "accuracy_acceptance": {
            "length": boots[0].accuracy_acceptance.length,
            "per_request": asdict(by_request) if by_request else None,
        },
        "seconds": [boot.seconds for boot in boots],
    }


def failed_arm(arm: Arm, reason: str) -> dict[str, Any]:
    """An arm without numbers, and why."""
    return {"arm": arm.name, "state": "failed", "reason": reason}
