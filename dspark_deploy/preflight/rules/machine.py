"""The machine: its GPUs, the address to listen on, and what the environment must hold."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule
from dspark_deploy.profile import LoadedProfile

UNTOLD = "nvidia"  # where only the driver is known


@rule("PLATFORM_MISSING", "GPUS_MISSING", "ARCH_DIFFERS")
def platform_present(loaded: LoadedProfile, facts: Facts) -> Findings:
    """The profile's GPUs are there."""
    hardware = loaded.profile.hardware
    if hardware.platform == "cpu":
        return
    if facts.gpu_platform != hardware.platform:
        found = f"{len(facts.gpus)} GPU(s) of {facts.gpu_platform}" if facts.gpus else "no GPU"
        yield error(
            "PLATFORM_MISSING",
            f"the profile is for {hardware.platform}, and this machine shows {found}",
            "run on such a machine, or check for it with --facts FILE from there",
            loaded.where("hardware", "platform"),
        )
        return
    if hardware.gpus > len(facts.gpus):
        yield error(
            "GPUS_MISSING",
            f"the profile needs {hardware.gpus} GPUs, and this machine shows {len(facts.gpus)}",
            "is a device left out of the container, or of HIP_VISIBLE_DEVICES?",
            loaded.where("hardware", "gpus"),
        )
    if hardware.arch and facts.gpus and set(facts.gpus) - {UNTOLD} not in ({hardware.arch}, set()):
        yield error(
            "ARCH_DIFFERS",
            f"the profile is for {hardware.arch}, and this machine has {', '.join(sorted(set(facts.gpus)))}",
            "kernels differ between architectures; use the profile for this one",
            loaded.where("hardware", "arch"),
        )


@rule("HOST_UNUSABLE", "PORT_IN_USE")
def port_is_free(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Someone else may serve on the port; a second engine would load for minutes and then die."""
    engine = loaded.profile.engine
    if facts.host_error:
        yield error(
            "HOST_UNUSABLE",
            f"{engine.host} can't be listened on: {facts.host_error}",
            "engine.host is an address of this machine: 127.0.0.1, or 0.0.0.0 for every interface",
            loaded.where("engine", "host"),
        )
    if facts.port_free is False:
        yield error(
            "PORT_IN_USE",
            f"{engine.host}:{engine.port} is in use",
            "stop what listens there, or take another with --set engine.port=PORT (0 takes a free one)",
            loaded.where("engine", "port"),
        )


@rule("ENV_UNSET")
def references_set(loaded: LoadedProfile, facts: Facts) -> Findings:
    """`${NAME}` in engine.env refers to a variable of the environment we were started in."""
    for name in facts.unset:
        yield error(
            "ENV_UNSET",
            f"engine.env refers to ${{{name}}}, which is not set",
            f"export {name}=... before dspark-serve",
            loaded.where("engine", "env"),
        )
