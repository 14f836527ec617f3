"""The draft: method, checkpoint and the number of speculative tokens."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.findings import Severity
from dspark_deploy.preflight.rules.base import Finding, Findings, error, note, rule, warning
from dspark_deploy.preflight.rules.context import (
    DEEPSEEK_V4,
    architecture,
    arg,
    family,
    trained_block,
    variable,
    where_env,
)
from dspark_deploy.profile import LoadedProfile

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
WATERMARK = "watermark-config"


@rule("DSPARK_ON_MTP_CKPT", "MTP_ON_DSPARK_CKPT")
def method_fits_checkpoint(loaded: LoadedProfile, facts: Facts) -> Findings:
    """DSpark stages are found by config.json's keys, never by the repository's name."""
    speculative, target = loaded.profile.speculative, facts.model
    if speculative is None or speculative.draft or target is None or not target.config:
        return
    if speculative.method == "dspark" and target.trained_block is None:
        yield error(
            "DSPARK_ON_MTP_CKPT",
            "speculative.method is dspark without a draft, and the target's config.json has no dspark_* keys",
            "name a draft in speculative.draft, or use a checkpoint that carries DSpark stages",
            loaded.where("speculative"),
            "vllm#52165",
        )
    if speculative.method == "mtp" and target.trained_block is not None:
        yield error(
            "MTP_ON_DSPARK_CKPT",
            "speculative.method is mtp, and the mtp.* tensors of this checkpoint are a DSpark draft: loading "
            "them ends in a KeyError on main_norm",
            f"set speculative.method to dspark, with num_speculative_tokens: {target.trained_block}",
            loaded.where("speculative", "method"),
            "vllm#52165",
        )


@rule("DRAFT_STAGES_MISSING")
def stages_are_there(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A re-quantised checkpoint can keep config.json's keys and lose the tensors that they speak of."""
    speculative, target = loaded.profile.speculative, facts.model
    if speculative is None or speculative.draft or target is None or not target.weight_bytes:
        return
    if target.trained_block is not None and not target.draft_tensors:
        yield error(
            "DRAFT_STAGES_MISSING",
            f"config.json of {target.name} speaks of a DSpark draft, and its weights have no mtp.* tensor",
            "download the whole checkpoint, or use a re-quantisation that kept mtp.*",
            loaded.where("model", "path"),
            "tonyd2wild/DeepSeek-v4-Flash-0731-DSpark-1M-NVFP4-KV-2x-DGX-Spark",
        )


@rule("DRAFT_TARGET_UNPROVEN")
def draft_belongs_to_target(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A draft learns one target's hidden states; with the weights of another it hardly ever guesses right."""
    speculative, target = loaded.profile.speculative, facts.model
    if speculative is None or not speculative.draft or target is None or target.trained_block is None:
        return
    yield warning(
        "DRAFT_TARGET_UNPROVEN",
        f"{speculative.draft} drafts for a target that carries a DSpark draft of its own",
        "leave speculative.draft out, unless this draft was trained on exactly these weights; one trained on "
        "a preview's was seen at 3 % acceptance",
        loaded.where("speculative", "draft"),
        "vllm#41834",
    )


@rule("K_ABOVE_BLOCK", "K_BELOW_BLOCK_GUARDED", "K_BELOW_BLOCK_UNGUARDED")
def k_fits_block(loaded: LoadedProfile, facts: Facts) -> Findings:
    """How many tokens a block drafter was trained for against how many are asked of it."""
    speculative = loaded.profile.speculative
    if speculative is None or speculative.method != "dspark":
        return
    block = trained_block(speculative, facts)
    if block is None:
        return
    k, where = speculative.num_speculative_tokens, loaded.where("speculative", "num_speculative_tokens")
    # 0.26 and 0.27 have the guard; the sources decide where they can be read, the release where not.
    guarded = facts.features.get("block_guard", facts.vllm_version.startswith(("0.26.", "0.27.")))
    if k > block:
        yield _above(k, block, where, architecture(loaded, facts))
    elif k < block and guarded and not speculative.draft:
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


def _above(k: int, block: int, where: str, arch: str) -> Finding:
    seen = (
        "; on sm121 two reports have an acceptance length of 1.3 to 2.2 at 7, against 2.7 at 5"
        if arch == "sm121"
        else ""
    )
    return Finding(
        "K_ABOVE_BLOCK",
        Severity.WARNING,
        f"num_speculative_tokens: {k} is above the trained block of {block}{seen}",
        f"use {block}, unless a measurement shows a longer acceptance length at {k}",
        where,
        "vllm#41834",
    )


@rule("ENGINE_TREATS_STAGES_AS_MTP")
def width_is_the_block(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Some engines read the number of draft stages as the number of tokens a draft can give."""
    speculative = loaded.profile.speculative
    if speculative is None or speculative.method != "dspark" or family(loaded, facts) not in DEEPSEEK_V4:
        return
    stages = facts.model.config.get("num_nextn_predict_layers") if facts.model else None
    k = speculative.num_speculative_tokens
    if facts.features.get("block_is_width", True) or not isinstance(stages, int) or stages < 1:
        return
    if k > stages and k % stages:
        yield error(
            "ENGINE_TREATS_STAGES_AS_MTP",
            f"vLLM {facts.vllm_version} takes the {stages} draft stages for the width of a draft, and "
            f"refuses num_speculative_tokens: {k} as not divisible by {stages}",
            "use a vLLM with the fix; a multiple of the stages would boot and draft past the trained block",
            loaded.where("speculative", "num_speculative_tokens"),
            "vllm#54631",
        )


@rule("DRAFT_TOPK_UNKNOWN_FIELD", "DRAFT_TOPK_NOT_QWEN3")
def draft_topk_is_known(loaded: LoadedProfile, facts: Facts) -> Findings:
    """An unknown field stops the engine, and so does this one with a draft that can't use it."""
    speculative = loaded.profile.speculative
    if speculative is None or speculative.dspark_draft_topk is None:
        return
    where = loaded.where("speculative", "dspark_draft_topk")
    if facts.features and not facts.has("draft_topk"):
        yield error(
            "DRAFT_TOPK_UNKNOWN_FIELD",
            f"vLLM {facts.vllm_version} does not know dspark_draft_topk and stops at it",
            "leave speculative.dspark_draft_topk out, or use a vLLM that has it",
            where,
        )
    source = facts.draft if speculative.draft else facts.model
    names = source.config.get("architectures") if source else None
    if isinstance(names, list) and names and not any(str(name).startswith("Qwen3") for name in names):
        yield error(
            "DRAFT_TOPK_NOT_QWEN3",
            f"dspark_draft_topk works with Qwen3's DSpark draft, and this one is {names[0]}",
            "leave speculative.dspark_draft_topk out",
            where,
        )


@rule("DSPARK_NEEDS_V2_RUNNER")
def dspark_has_its_runner(loaded: LoadedProfile, facts: Facts) -> Findings:
    """DSpark's speculator, its draft sampling and its rejection sampler are in the V2 model runner alone."""
    speculative = loaded.profile.speculative
    if speculative is None or speculative.method != "dspark" or loaded.profile.hardware.platform == "cpu":
        return
    found = variable(loaded, facts, RUNNER)
    if found is not None and found.strip().lower() in ("0", "false"):
        yield error(
            "DSPARK_NEEDS_V2_RUNNER",
            f"{RUNNER} is {found}, and DSpark is in the V2 runner alone: V1 drafts with its EAGLE proposer",
            f"leave {RUNNER} out, or set it to '1'",
            where_env(loaded, RUNNER),
            "vllm v1/worker/gpu_model_runner.py",
        )


@rule("WATERMARK_DRAFTS")
def watermarked_drafts_are_sampled(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM watermarks drafts only where they are sampled, and verified one by one."""
    speculative = loaded.profile.speculative
    if speculative is None or arg(loaded, WATERMARK) in (None, ""):
        return
    wanted = {"draft_sample_method": "probabilistic", "rejection_sample_method": "standard"}
    for name, value in wanted.items():
        found = getattr(speculative, name)
        if found != value:
            yield error(
                "WATERMARK_DRAFTS",
                f"{name}: {found} together with {WATERMARK} is refused by vLLM at its start",
                f"set speculative.{name} to {value}, or leave {WATERMARK} out",
                loaded.where("speculative", name),
                "vllm config/vllm.py",
            )
