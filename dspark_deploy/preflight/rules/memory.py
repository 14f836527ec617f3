"""Memory: what must fit into a GPU before a load of ten minutes shows that it doesn't."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.preflight.rules.context import arg, where_arg, whole
from dspark_deploy.profile import LoadedProfile

GIB = 1 << 30
UTILISATION = "gpu-memory-utilization"
DEFAULT_UTILISATION = 0.9  # vLLM's
FP32 = 4


def _utilisation(loaded: LoadedProfile) -> float:
    value = arg(loaded, UTILISATION)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if numeric and isinstance(value, int | float) else DEFAULT_UTILISATION


@rule("WEIGHTS_TOO_LARGE")
def weights_fit(loaded: LoadedProfile, facts: Facts) -> Findings:
    """The weights, spread evenly over the GPUs of one model copy, against what vLLM may take of each."""
    if not facts.gpu_memory_gib or facts.model is None or not facts.model.weight_bytes:
        return
    gpus = (whole(loaded, "tensor-parallel-size") or 1) * (whole(loaded, "pipeline-parallel-size") or 1)
    if arg(loaded, "enable-expert-parallel") is True:
        gpus *= whole(loaded, "data-parallel-size") or 1
    share = facts.model.weight_bytes / GIB / gpus
    allowed = min(facts.gpu_memory_gib) * _utilisation(loaded)
    if share > allowed:
        yield error(
            "WEIGHTS_TOO_LARGE",
            f"the weights are {facts.model.weight_bytes / GIB:.0f} GiB, {share:.0f} GiB for each of {gpus} "
            f"GPU(s), and vLLM may take {allowed:.0f} GiB of each",
            "raise tensor-parallel-size, or use GPUs with more memory",
            where_arg(loaded, "tensor-parallel-size"),
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
