"""Kernel back ends by model and architecture, where the field's answers contradict one another."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.findings import Finding, Severity
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.preflight.rules.context import (
    DEEPSEEK_V4,
    architecture,
    arg,
    family,
    variable,
    where_arg,
    where_env,
)
from dspark_deploy.profile import LoadedProfile

MOE = "moe-backend"
AITER, AITER_MOE = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"

# (model_type, architecture, moe-backend) -> severity, what happens, what to do, source
MOE_BACKENDS: dict[tuple[str, str, str], tuple[Severity, str, str, str]] = {
    ("deepseek_v4", "gfx942", "aiter"): (
        Severity.ERROR,
        "is refused at start: it needs FP4 in hardware",
        f"leave {MOE} out, so that vLLM chooses",
        "InferenceX dsv4_fp8_mi300x_mtp.sh",
    ),
    ("deepseek_v41", "gfx950", "aiter_triton_mxfp4_bf16"): (
        Severity.WARNING,
        "pins a kernel that decodes 4 to 9 % slower than aiter's own choice",
        f"set {MOE} to aiter",
        "vllm-project/recipes#962",
    ),
}


@rule("MOE_BACKEND")
def moe_backend_fits(loaded: LoadedProfile, facts: Facts) -> Findings:
    """DeepSeek-V4 and V4.1 take different experts' kernels on the same architecture."""
    backend, arch = arg(loaded, MOE), architecture(loaded, facts)
    row = MOE_BACKENDS.get((family(loaded, facts), arch, str(backend)))
    if row is not None:
        severity, what, remedy, source = row
        message = f"{MOE}: {backend} with {family(loaded, facts)} on {arch} {what}"
        yield Finding("MOE_BACKEND", severity, message, remedy, where_arg(loaded, MOE), source)


@rule("AITER_SWITCHED_OFF")
def aiter_is_on_where_asked(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Two settings that ask for AITER, and a third that switches it off without a word."""
    if loaded.profile.hardware.platform != "rocm" or variable(loaded, facts, AITER) in ("1", "true", "True"):
        return
    asked = []
    if variable(loaded, facts, AITER_MOE) in ("1", "true", "True"):
        asked.append(f"{AITER_MOE}=1")
    if str(arg(loaded, MOE)).startswith("aiter"):
        asked.append(f"{MOE}: {arg(loaded, MOE)}")
    if loaded.profile.mhc.provider == "aiter":
        asked.append("mhc.provider: aiter")
    if asked:
        yield error(
            "AITER_SWITCHED_OFF",
            f"{' and '.join(asked)} asks for AITER, and {AITER} is not 1, which switches it off",
            f"set engine.env.{AITER} to '1'",
            where_env(loaded, AITER),
        )


@rule("PREFIX_CACHE_UNUSED")
def prefix_caching_hits(loaded: LoadedProfile, facts: Facts) -> Findings:
    """With a DSpark draft, DeepSeek-V4's prefix cache was seen to hit nothing, and to say nothing."""
    if loaded.profile.speculative is None or family(loaded, facts) not in DEEPSEEK_V4:
        return
    if arg(loaded, "enable-prefix-caching") is True:
        yield warning(
            "PREFIX_CACHE_UNUSED",
            "prefix caching beside a DSpark draft of DeepSeek-V4 was seen with a hit rate of exactly 0",
            "send one prompt twice and look at vllm:prefix_cache_hits_total before you plan with it",
            where_arg(loaded, "enable-prefix-caching"),
            "vllm#48459",
        )
