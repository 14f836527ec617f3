"""What is asked of one engine: the profile's plan, less of it for an engine beside a sweep's search.

What cannot be asked of it is refused here, before it is booted.
"""

from __future__ import annotations

from dataclasses import replace

from dspark_deploy.errors import InputError
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from tuning.acceptance import NO_DRAFTS
from tuning.judging.prediction import synthetic_flags
from tuning.measurement import Measurement, Plan
from tuning.screening import PROBE_REQUESTS, SYNTHETIC_RUN
from tuning.space import ANSWERS, BOOT, PROBE, Configuration
from tuning.workload import Workload

CONTEXT = ("engine", "args", "max-model-len")


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


def refuse_what_cannot_be_asked(plan: Plan, workload: Workload, loaded: LoadedProfile) -> None:
    """Raises InputError for requests beyond the profile's max-model-len, and for more questions than exist.

    Prompts whose length is known only to the engine's tokenizer count as one token: what passes here can
    still be too long for it.
    """
    faults = []
    there = workload.most_questions()
    if there is not None and plan.accuracy_problems > there:
        faults.append(
            f"--accuracy-problems {plan.accuracy_problems}: workload {workload.name} has {there} questions; "
            f"ask at most that many"
        )
    context = loaded.profile.engine.args.get(CONTEXT[-1])
    if not isinstance(context, int) or context < 1:  # vLLM's own choice, or written as 4k
        context = None
    asked = {"a request of its load levels": workload.input_tokens + plan.output_tokens}
    if plan.accuracy_problems:
        asked["an accuracy question"] = 1 + workload.longest_answer(plan.output_tokens)
    for what, tokens in asked.items():
        if context is not None and tokens > context:
            faults.append(
                f"{loaded.where(*CONTEXT)}: {'.'.join(CONTEXT)} is {context}, and workload {workload.name} "
                f"wants {tokens} tokens or more, prompt and answer, for {what}; raise it to that and the "
                f"longest prompt, or ask for less"
            )
    if faults:
        raise InputError(faults)
