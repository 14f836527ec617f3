"""AMD's AITER for mHC: the right distribution, new enough, with what this vLLM calls, for these shapes."""

from __future__ import annotations

from packaging.version import Version

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule
from dspark_deploy.profile import LoadedProfile

AITER_FLOOR = Version("0.1.14")  # the first release with the mHC operators
AITER_IMAGE = "use an image that holds a newer amd-aiter, or set mhc.provider: tilelang"


def _serves_mhc_with_aiter(loaded: LoadedProfile, facts: Facts) -> bool:
    """On ROCm vLLM takes AITER for mHC wherever it is there, unless the profile says otherwise."""
    profile = loaded.profile
    config = facts.model.config if facts.model is not None else {}
    may_have_mhc = not config or "hc_mult" in config
    return profile.hardware.platform == "rocm" and profile.mhc.provider in ("auto", "aiter") and may_have_mhc


@rule("AITER_IMPOSTOR", "AITER_MISSING", "AITER_TOO_OLD")
def aiter_installed(loaded: LoadedProfile, facts: Facts) -> Findings:
    """AMD's AITER is the distribution amd-aiter; the name `aiter` on PyPI is another project."""
    if not _serves_mhc_with_aiter(loaded, facts):
        return
    where = loaded.where("mhc", "provider")
    found = facts.versions.get("amd-aiter", "")
    if not found and "aiter" in facts.versions:
        yield error(
            "AITER_IMPOSTOR",
            "the distribution `aiter` is installed, which is not AMD's; vLLM would import it as AITER",
            "type: pip uninstall -y aiter; AMD's is amd-aiter, and comes with the ROCm image",
            where,
        )
    elif not found and loaded.profile.mhc.provider == "aiter":
        yield error(
            "AITER_MISSING", "mhc.provider is aiter, and amd-aiter is not installed", AITER_IMAGE, where
        )
    if not found:
        return
    try:
        old = Version(found) < AITER_FLOOR
    except ValueError:  # built from a checkout; its signatures are looked at all the same
        return
    if old:
        yield error(
            "AITER_TOO_OLD",
            f"amd-aiter {found} is older than {AITER_FLOOR}, the first with mHC operators",
            AITER_IMAGE,
            where,
        )


@rule("AITER_UNREADABLE", "AITER_NO_DELAYED_NORM", "AITER_SIGNATURE")
def aiter_fits_vllm(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM asks whether AITER is there, not whether it has what vLLM calls."""
    aiter = facts.aiter
    if aiter is None or "amd-aiter" not in facts.versions or not _serves_mhc_with_aiter(loaded, facts):
        return
    where = loaded.where("mhc", "provider")
    if aiter.problem:
        yield error("AITER_UNREADABLE", f"AITER can't be read: {aiter.problem}", AITER_IMAGE, where)
        return
    if aiter.needs_delayed and not aiter.has_delayed and "gfx950" in facts.gpus:
        yield error(
            "AITER_NO_DELAYED_NORM",
            f"vLLM {facts.vllm_version} uses AITER's fused post with delayed norm on gfx950, and this AITER "
            f"has no such module: the first forward of DeepSeek-V4.1 would fail",
            AITER_IMAGE,
            where,
        )
    for mismatch in aiter.mismatches():
        yield error("AITER_SIGNATURE", mismatch, AITER_IMAGE, where)


@rule("AITER_HIDDEN_SIZE", "AITER_STREAMS")
def aiter_serves_shape(loaded: LoadedProfile, facts: Facts) -> Findings:
    """AITER's mHC kernels are for four streams, a hidden size in steps of 256, and bf16."""
    if (
        not _serves_mhc_with_aiter(loaded, facts)
        or facts.model is None
        or loaded.profile.mhc.provider != "aiter"
    ):
        return
    config, where = facts.model.config, loaded.where("mhc", "provider")
    hidden, streams = config.get("hidden_size"), config.get("hc_mult")
    if isinstance(hidden, int) and hidden % 256:
        yield error(
            "AITER_HIDDEN_SIZE",
            f"AITER's mHC kernels need a hidden size divisible by 256, and the checkpoint has {hidden}",
            "set mhc.provider: auto",
            where,
        )
    if streams is not None and streams != 4:
        yield error(
            "AITER_STREAMS",
            f"AITER's mHC kernels are for hc_mult 4, and the checkpoint has {streams}",
            "set mhc.provider: auto",
            where,
        )


@rule("MHC_DTYPE")
def mhc_is_bfloat16(loaded: LoadedProfile, facts: Facts) -> Findings:
    """The mHC kernels of AITER and TileLang take bf16 activations, and no other type."""
    profile = loaded.profile
    config = facts.model.config if facts.model is not None else {}
    if profile.hardware.platform != "rocm" or profile.mhc.provider == "torch" or "hc_mult" not in config:
        return
    asked = profile.engine.args.get("dtype", "auto")
    dtype = config.get("torch_dtype", config.get("dtype", "bfloat16")) if asked == "auto" else asked
    if dtype != "bfloat16":
        yield error(
            "MHC_DTYPE",
            f"activations are {dtype}, and the mHC kernels take bfloat16 only",
            "set engine.args.dtype: bfloat16",
            loaded.where("engine", "args", "dtype") or loaded.where("engine"),
        )


@rule("MHC_NOT_ON_CPU")
def a_cpu_has_no_gpu_kernels(loaded: LoadedProfile, facts: Facts) -> Findings:
    """The worker refuses them too, but only when it has loaded the model's code, a minute into the start."""
    config = facts.model.config if facts.model else {}
    provider = loaded.profile.mhc.provider
    if loaded.profile.hardware.platform != "cpu" or provider in ("auto", "torch"):
        return
    if not config or "hc_mult" in config:
        yield error(
            "MHC_NOT_ON_CPU",
            f"mhc.provider is {provider}, whose kernels are for GPUs, and hardware.platform is cpu",
            "set mhc.provider to auto, vLLM's C++ kernels where it has them for this CPU, or to torch",
            loaded.where("mhc", "provider"),
        )


@rule("MHC_NOT_ON_CUDA")
def cuda_models_choose_themselves(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM's CUDA models call their mHC kernels as plain functions, so nothing there follows a provider."""
    provider = loaded.profile.mhc.provider
    if loaded.profile.hardware.platform == "cuda" and provider != "auto":
        yield error(
            "MHC_NOT_ON_CUDA",
            f"mhc.provider is {provider}, and vLLM's models for CUDA have no choice of it",
            "set mhc.provider to auto",
            loaded.where("mhc", "provider"),
        )
