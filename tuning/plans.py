"""What a sweep asks of one engine: the profile's plan, less of it for an engine beside the search."""

from __future__ import annotations

from dataclasses import replace

from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from tuning.acceptance import NO_DRAFTS
from tuning.judging.prediction import synthetic_flags
from tuning.measurement import Measurement, Plan
from tuning.screening import PROBE_REQUESTS, SYNTHETIC_RUN
from tuning.space import ANSWERS, BOOT, PROBE, Configuration


def asked_of(
    configuration: Configuration,
    loaded: LoadedProfile,
    facts: Facts,
    goal_load: int,
    base: Measurement | None = None,
) -> tuple[Plan, list[str]]:
    """What is asked of the engine, and further flags of vLLM's; `base` is what a synthetic run imitates.

    A boot again and a probe have no questions. The torch reference has all of them, and a few requests at the
    widest load, so that batches are as wide as the others' and what fused kernels are worth can be said.
    """
    plan, others = Plan.of_sweep(loaded.profile.sweep), dict(configuration.others)
    few = min(plan.requests, PROBE_REQUESTS)
    if ANSWERS in others:
        return replace(plan, loads=[max(plan.loads)], requests=few), []
    if BOOT in others:
        return replace(plan, accuracy_problems=0, repeat=int(others[BOOT])), []
    if PROBE in others:
        plan = replace(plan, accuracy_problems=0, requests=few, loads=[goal_load])
    speculative = loaded.profile.speculative
    if others.get(PROBE) == SYNTHETIC_RUN and speculative is not None and base is not None:
        counted = sum((load.acceptance for load in base.loads), NO_DRAFTS)
        return plan, synthetic_flags(speculative, facts, counted, configuration.num_speculative_tokens)
    return plan, []
