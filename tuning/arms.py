"""The arms of a measurement: the same engine without speculation by torch, fused, at fixed k, and adaptive.

    reference    torch for every mHC operator, no speculation: what everything is compared with
    fused        the profile's mHC provider, no speculation
    fixed        the profile's k, each step verifying all of it
    adaptive     vLLM chooses how much of k to verify; where the preflight finds nothing against it

An arm that can't run says why and has no numbers. Reference and fused are the same engine where the model has
no mHC; they are measured all the same, since two boots of one engine are the null of everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark_deploy.errors import InputError
from dspark_deploy.preflight import Facts, Severity, check
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.loading import validated

REFERENCE, FUSED, FIXED, ADAPTIVE = "reference", "fused", "fixed", "adaptive"
ARMS = (REFERENCE, FUSED, FIXED, ADAPTIVE)


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm. `refused` says why it can't run here; empty where it can."""

    name: str
    loaded: LoadedProfile
    refused: str = ""


def _changes(name: str) -> dict[str, Any]:
    if name == REFERENCE:
        return {"speculative": None, "mhc.provider": "torch"}
    if name == FUSED:
        return {"speculative": None}
    return {"speculative.verification": {"kind": name}}


def arms(loaded: LoadedProfile, facts: Facts, names: list[str]) -> list[Arm]:
    """The arms by name, in the order of `ARMS`. Raises InputError for a name that is none."""
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise InputError(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    return [_arm(name, loaded, facts) for name in ARMS if name in names]


def _arm(name: str, loaded: LoadedProfile, facts: Facts) -> Arm:
    if name in (FIXED, ADAPTIVE) and loaded.profile.speculative is None:
        return Arm(name, loaded, "the profile has no speculative section")
    if name == ADAPTIVE and facts.features and not facts.has("adaptive_verification"):
        return Arm(name, loaded, f"vLLM {facts.vllm_version} has no adaptive verification")
    revised = validated(loaded, {**_changes(name), "engine.port": 0})
    if name == ADAPTIVE and revised.profile.engine.args.get("enforce-eager") is True:
        return Arm(name, revised, "adaptive verification needs full graphs, and enforce-eager is on")
    # The port was probed for the profile as it is; an arm takes a free one.
    errors = [
        finding
        for finding in check(revised, facts)
        if finding.severity is Severity.ERROR and finding.code != "PORT_IN_USE"
    ]
    return Arm(name, revised, "; ".join(f"{finding.code}: {finding.message}" for finding in errors))
