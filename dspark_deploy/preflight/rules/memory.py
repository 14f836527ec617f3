"""Memory: what must fit into a GPU before a load of ten minutes shows that it doesn't."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.preflight.rules.context import arg, where_arg, whole
from dspark_deploy.profile import LoadedProfile

GIB = 1 << 30
UTILISATION = "gpu-memory-utilization"
DEFAULT_UTILISATION = 0.9  # vLLM's
FP32, BF16 = 4, 2
# For everything but weights, of what vLLM may take. A bound of this project's own, not a measurement.
KV_LEAST = 0.05
DRAFT_LOGITS_SHARE = 0.02  # likewise


def _utilisation(loaded: LoadedProfile) -> float:
    value = arg(loaded, UTILISATION)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if numeric and isinstance(value, int | float) else DEFAULT_UTILISATION


@rule("WEIGHTS_TOO_LARGE", "KV_CACHE_SMALL")
def weights_fit(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Weights of target and draft, spread evenly over the GPUs of a copy, against what vLLM may take of each.

    What is left is for the KV cache, activations and graphs. A cache's bytes per token depend on the model's
    attention, so only a share that leaves next to nothing is spoken of.
    """
    if not facts.gpu_memory_gib or facts.model is None or not facts.model.weight_bytes:
        return
    gpus = (whole(loaded, "tensor-parallel-size") or 1) * (whole(loaded, "pipeline-parallel-size") or 1)
    if arg(loaded, "enable-expert-parallel") is True:
        gpus *= whole(loaded, "data-parallel-size") or 1
    # A draft that the target carries is in the target's files.
    drafts = facts.draft.weight_bytes if facts.draft is not None else 0
    weights = (facts.model.weight_bytes + drafts) / GIB
    share = weights / gpus
    allowed = min(facts.gpu_memory_gib) * _utilisation(loaded)
    where = where_arg(loaded, "tensor-parallel-size")
    told = (
        f"{weights:.0f} GiB of weights{', the draft among them,' if drafts else ''} are {share:.0f} GiB for "
        f"each of {gpus} GPU(s), and vLLM may take {allowed:.0f} GiB of each"
    )
    if share > allowed:
        more = "raise tensor-parallel-size, or use GPUs with more memory"
        yield error("WEIGHTS_TOO_LARGE", told, more, where)
    elif share > allowed * (1 - KV_LEAST):
        yield warning(
            "KV_CACHE_SMALL",
            f"{told}: {allowed - share:.1f} GiB remain for KV cache, activations and graphs",
            f"raise tensor-parallel-size or {UTILISATION}, or lower max-model-len and max-num-seqs",
            where,
        )


@rule("SAMPLER_LOGITS_LARGE")
def sampler_logits_fit(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Verification holds fp32 logits of every drafted token, and vLLM's memory profile leaves them out.

    max_num_seqs * (k + 1) * vocabulary * 4 bytes, against what gpu-memory-utilization leaves free.
    """
    speculative, sequences = loaded.profile.speculative, whole(loaded, "max-num-seqs")
    vocabulary = facts.model.config.get("vocab_size") if facts.model else None
    if (
        speculative is None
        or sequences is None
        or not isinstance(vocabulary, int)
        or not facts.gpu_memory_gib
    ):
        return
    k = speculative.num_speculative_tokens
    logits = sequences * (k + 1) * vocabulary * FP32 / GIB
    free = min(facts.gpu_memory_gib) * (1 - _utilisation(loaded))
    if logits > free:
        yield warning(
            "SAMPLER_LOGITS_LARGE",
            f"max-num-seqs * (k+1) * vocabulary * 4 B = {sequences} * {k + 1} * {vocabulary} * 4 B = "
            f"{logits:.1f} GiB of logits, and {UTILISATION}: {_utilisation(loaded)} leaves {free:.1f} GiB",
            f"lower max-num-seqs or {UTILISATION}",
            where_arg(loaded, "max-num-seqs"),
            "vllm#48037",
        )


@rule("DRAFT_LOGITS_LARGE")
def draft_logits_fit(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Probabilistic drafting keeps a step's draft logits, in the head's bf16, where greedy keeps none.

    max_num_seqs * k * vocabulary * 2 bytes on every GPU, taken from the KV cache.
    """
    speculative, sequences = loaded.profile.speculative, whole(loaded, "max-num-seqs")
    vocabulary = facts.model.config.get("vocab_size") if facts.model else None
    if (
        speculative is None
        or speculative.draft_sample_method != "probabilistic"
        or sequences is None
        or not isinstance(vocabulary, int)
        or not facts.gpu_memory_gib
    ):
        return
    k = speculative.num_speculative_tokens
    logits = sequences * k * vocabulary * BF16 / GIB
    allowed = min(facts.gpu_memory_gib) * _utilisation(loaded)
    if logits > allowed * DRAFT_LOGITS_SHARE:
        yield warning(
            "DRAFT_LOGITS_LARGE",
            f"probabilistic drafting keeps max-num-seqs * k * vocabulary * 2 B = {sequences} * {k} * "
            f"{vocabulary} * 2 B = {logits:.1f} GiB of logits, of the {allowed:.0f} GiB that vLLM may take",
            "lower max-num-seqs, or set speculative.draft_sample_method to greedy, whose drafts are accepted "
            "less often above temperature 0",
            loaded.where("speculative", "draft_sample_method"),
            "vllm v1/worker/gpu/spec_decode/speculator.py",
        )
