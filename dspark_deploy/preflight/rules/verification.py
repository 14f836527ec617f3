"""Verification: which ways to verify drafts this engine, platform and model have."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.preflight.rules.context import (
    DEEPSEEK_V4,
    architecture,
    arg,
    captures_graphs,
    family,
    graph_mode,
    where_arg,
    whole,
)
from dspark_deploy.profile import LoadedProfile

USE_FIXED = "set speculative.verification to {kind: fixed} or {kind: schedule, ...}"
FULL_GRAPHS = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def _adaptive(loaded: LoadedProfile) -> bool:
    speculative = loaded.profile.speculative
    return speculative is not None and speculative.verification.kind == "adaptive"


def _where(loaded: LoadedProfile) -> str:
    return loaded.where("speculative", "verification")


@rule("ADAPTIVE_NEEDS_GRAPHS")
def adaptive_has_graphs(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Adaptive verification needs full CUDA graphs, which a CPU has not."""
    mode = graph_mode(loaded)
    if _adaptive(loaded) and not (captures_graphs(loaded) and (mode is None or mode in FULL_GRAPHS)):
        yield error(
            "ADAPTIVE_NEEDS_GRAPHS",
            "adaptive verification needs full CUDA graphs, and this launch captures none",
            USE_FIXED
            if mode is None
            else f"{USE_FIXED}, or cudagraph_mode to one of {', '.join(FULL_GRAPHS)}",
            _where(loaded),
        )


@rule("ADAPTIVE_UNKNOWN_FIELD")
def adaptive_is_known(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Before 0.28 the field is unknown, and an unknown field stops the engine."""
    if _adaptive(loaded) and facts.features and not facts.has("adaptive_verification"):
        yield error(
            "ADAPTIVE_UNKNOWN_FIELD",
            f"vLLM {facts.vllm_version} does not know enable_adaptive_verification and stops at it",
            f"use vLLM 0.28 or later, or {USE_FIXED}",
            _where(loaded),
            "vllm#47808",
        )


@rule("ADAPTIVE_V41_ROCM")
def adaptive_on_v41_rocm(loaded: LoadedProfile, facts: Facts) -> Findings:
    """V4.1's indexer on ROCm could not run uneven batches until it was taught to."""
    rocm = loaded.profile.hardware.platform == "rocm"
    if not (_adaptive(loaded) and rocm and family(loaded, facts) == "deepseek_v41"):
        return
    if facts.features and not facts.has("adaptive_v41_rocm"):
        yield error(
            "ADAPTIVE_V41_ROCM",
            f"vLLM {facts.vllm_version} has no adaptive verification for DeepSeek-V4.1 on ROCm",
            f"use a build whose models/deepseek_v41/amd/rocm.py knows the setting, or {USE_FIXED}",
            _where(loaded),
            "vllm#58151",
        )


@rule("ADAPTIVE_SM90")
def adaptive_on_hopper(loaded: LoadedProfile, facts: Facts) -> Findings:
    """On Hopper the sparse attention of DeepSeek-V4 was refused at start, where a fallback was promised.

    V4.1 is left at fixed verification there for the same reason (vllm#56797).
    """
    if _adaptive(loaded) and architecture(loaded, facts) == "sm90" and family(loaded, facts) in DEEPSEEK_V4:
        yield error(
            "ADAPTIVE_SM90",
            "adaptive verification of DeepSeek-V4 on sm90 was refused at start by its attention backend",
            USE_FIXED,
            _where(loaded),
            "vllm#54011",
        )


@rule("ADAPTIVE_WITH_LORA", "ADAPTIVE_WITH_PP")
def adaptive_stands_alone(loaded: LoadedProfile, facts: Facts) -> Findings:
    """What vLLM's configuration refuses beside adaptive verification."""
    if not _adaptive(loaded):
        return
    if arg(loaded, "enable-lora") is True:
        yield error(
            "ADAPTIVE_WITH_LORA",
            "vLLM refuses adaptive verification beside LoRA",
            f"leave enable-lora out, or {USE_FIXED}",
            where_arg(loaded, "enable-lora"),
        )
    stages = whole(loaded, "pipeline-parallel-size")
    if stages is not None and stages > 1:
        yield error(
            "ADAPTIVE_WITH_PP",
            f"vLLM refuses adaptive verification with pipeline-parallel-size: {stages}",
            f"use tensor-parallel-size instead, or {USE_FIXED}",
            where_arg(loaded, "pipeline-parallel-size"),
        )


@rule("SCHEDULE_WITH_DP")
def schedule_stands_without_copies(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM drops a schedule where data-parallel ranks could choose differently, and runs a fixed k."""
    speculative, ranks = loaded.profile.speculative, whole(loaded, "data-parallel-size")
    if speculative is None or speculative.verification.kind != "schedule" or ranks is None or ranks < 2:
        return
    yield warning(
        "SCHEDULE_WITH_DP",
        f"with data-parallel-size: {ranks} vLLM drops the schedule and verifies "
        f"{speculative.num_speculative_tokens} tokens in every step",
        "start one engine for each rank behind a proxy, or set speculative.verification to {kind: fixed}",
        _where(loaded),
        "vllm config/vllm.py",
    )
