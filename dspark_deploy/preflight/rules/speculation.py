"""The draft: method, checkpoint and the number of speculative tokens."""

from __future__ import annotations

from dspark_deploy.preflight.checkpoint import Checkpoint
from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, note, rule, warning
from dspark_deploy.profile import LoadedProfile


@rule("DSPARK_ON_MTP_CKPT")
def method_fits_checkpoint(loaded: LoadedProfile, facts: Facts) -> Findings:
    """DSpark stages are found by config.json's keys, never by the repository's name."""
    speculative, target = loaded.profile.speculative, facts.model
    if speculative is None or speculative.draft or target is None or not target.config:
        return
    if target.trained_block is None:
        yield error(
            "DSPARK_ON_MTP_CKPT",
            "speculative.method is dspark without a draft, and the target's config.json has no dspark_* keys",
            "name a draft in speculative.draft, or use a checkpoint that carries DSpark stages",
            loaded.where("speculative"),
            "vllm#52165",
        )


@rule("K_ABOVE_BLOCK", "K_BELOW_BLOCK_GUARDED", "K_BELOW_BLOCK_UNGUARDED")
def k_fits_block(loaded: LoadedProfile, facts: Facts) -> Findings:
    """How many tokens a block drafter was trained for against how many are asked of it."""
    speculative = loaded.profile.speculative
    source: Checkpoint | None = facts.draft if speculative and speculative.draft else facts.model
    block = source.trained_block if source else None
    if speculative is None or block is None:
        return
    k, where = speculative.num_speculative_tokens, loaded.where("speculative", "num_speculative_tokens")
    if k > block:
        yield warning(
            "K_ABOVE_BLOCK",
            f"num_speculative_tokens: {k} is above the trained block of {block}",
            f"use {block}, unless a measurement shows a longer acceptance length at {k}",
            where,
            "vllm#41834",
        )
    elif k < block and facts.vllm_version.startswith(("0.26.", "0.27.")) and not speculative.draft:
        yield error(
            "K_BELOW_BLOCK_GUARDED",
            f"num_speculative_tokens: {k} is below the trained block of {block}, which vLLM "
            f"{facts.vllm_version} refuses at start",
            f"use {block}, or a later vLLM",
            where,
            "vllm#50012",
        )
    elif k < block:
        yield note(
            "K_BELOW_BLOCK_UNGUARDED",
            f"num_speculative_tokens: {k} is below the trained block of {block}",
            "legitimate where measured to be best, as under high load",
            where,
            "vllm-project/recipes#967",
        )
