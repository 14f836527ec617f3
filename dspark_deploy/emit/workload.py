"""What every format renders: the profile as it is read there, its secrets by name, caches, mounts, times.

The container runs `dspark-serve --profile`, so that preflight, plugin and numerics gate run on the machine
that serves. The profile goes along as text, with `extends` and `--set` resolved. A secret's value is never in
it: what stands there is `${NAME}`, and each format says where NAME comes from.

Not covered: a secret inside `engine.args`, other than `api-key` and `hf-token`. Nothing can refer to it, so
it is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_deploy.errors import InputError
from dspark_deploy.launch.command import SECRET_VARIABLES, redacted_command
from dspark_deploy.launch.nodes import answers, node_count
from dspark_deploy.launch.supervised import GUARDIAN_MARGIN_S
from dspark_deploy.preflight.caches import cache_folders
from dspark_deploy.preflight.checkpoint import BUILTIN
from dspark_deploy.preflight.facts import API_KEY
from dspark_deploy.profile import LoadedProfile, Profile
from dspark_deploy.profile.document import Path_, dotted
from dspark_deploy.profile.loading import validated
from dspark_deploy.profile.schema import REFERENCE
from dspark_deploy.redaction import is_secret, mask_text, redacted

PROGRAM = "dspark-serve"
CACHE = "/cache"
PROFILE_FILE = "/etc/dspark/profile.yaml"
PROBE_PERIOD_S = 10
# An engine that is late ends itself and says why; whoever waits for it must not be quicker.
MARGIN_S = 60
EVERY_INTERFACE = "0.0.0.0"  # noqa: S104


@dataclass(frozen=True, slots=True)
class Workload:
    """One checked launch, for any format. `secrets` are names of variables, never values.

    `text` is the profile that `dspark-serve --profile` reads there; `caches` is, by variable, the name of a
    folder below the one that outlives the container; `mounts` are the host's folders that are read;
    `extra` are the flags after `--`.
    """

    loaded: LoadedProfile
    text: str
    secrets: list[str]
    caches: dict[str, str]
    mounts: list[str]
    extra: list[str]

    @property
    def profile(self) -> Profile:
        """The profile as it is read there."""
        return self.loaded.profile

    @property
    def name(self) -> str:
        """The profile's name as DNS, Docker and Slurm take one."""
        kept = "".join(letter if letter.isalnum() else "-" for letter in self.profile.name.lower())
        return kept[:40].strip("-")

    @property
    def nodes(self) -> int:
        """How many machines the engine is spread over."""
        return node_count(self.profile)

    @property
    def digest(self) -> str:
        """Differs where the profile does, so that a running copy can be told from this one."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def startup_s(self) -> int:
        """How long a start may take: loading, compiling and capture, as the profile says, and a margin."""
        return self.profile.engine.ready_timeout_s + MARGIN_S

    @property
    def stop_s(self) -> int:
        """How long a stop may take: the engine's own time, and the guardian's beside it."""
        return math.ceil(self.profile.engine.stop_timeout_s + GUARDIAN_MARGIN_S) + PROBE_PERIOD_S

    def answers(self, rank: int) -> bool:
        """Whether the node of this rank has an API server, and so a `/health`."""
        return answers(self.profile, rank)

    def arguments(self, rank: str | int = 0, head: str = "") -> list[str]:
        """What `dspark-serve` is given in a container; `rank` and `head` where there are several nodes."""
        place = ["--node-rank", str(rank), "--head-address", head] if self.nodes > 1 else []
        after = ["--", *self.extra] if self.extra else []
        return ["--profile", PROFILE_FILE, "--run-dir", f"{CACHE}/runs", *place, *after]

    def cache_environment(self, folder: str = CACHE) -> dict[str, str]:
        """The variables that put kernels, graphs and downloads below `folder`."""
        return {name: f"{folder}/{below}" for name, below in self.caches.items()}


def workload(loaded: LoadedProfile, extra: Sequence[str], host: str | None = None) -> Workload:
    """The launch of a profile that the preflight has passed. `host` is where the engine listens there.

    Raises InputError for a secret that nothing can refer to, and for a port that nobody could be told.
    """
    engine, speculative = loaded.profile.engine, loaded.profile.speculative
    if engine.port == 0:
        raise InputError(
            f"{loaded.where('engine', 'port')}: engine.port: 0 takes another port at each start, and a "
            f"rendered file has to name it; use --set engine.port=8000"
        )
    env, secrets = by_reference(engine.env)
    # Whoever reaches the port uses the GPUs, and a container's port is reached from other machines.
    needed = [API_KEY, *(variable for name, variable in SECRET_VARIABLES.items() if name in engine.args)]
    for name in needed:
        if name not in env:
            env[name] = f"${{{name}}}"
            secrets.append(name)
    args = {name: value for name, value in engine.args.items() if name not in SECRET_VARIABLES}
    changes: dict[str, Any] = {"engine.args": args, "engine.env": env}
    folders = {"model.path": loaded.profile.model.path}
    if speculative is not None and speculative.draft:
        folders["speculative.draft"] = speculative.draft
    folders = {key: str(Path(path).absolute()) for key, path in folders.items() if is_folder(path)}
    changes |= folders
    if host is not None:
        changes["engine.host"] = host
    inside = validated(loaded, changes)
    refuse_other_secrets(inside, extra)
    text = yaml.safe_dump(inside.values, sort_keys=False, allow_unicode=True, width=110)
    caches = cache_names(inside)
    return Workload(inside, text, sorted(set(secrets)), caches, sorted(set(folders.values())), list(extra))


def by_reference(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """`engine.env` with secrets replaced by references, and the names that all its references need."""
    kept: dict[str, str] = {}
    for name, value in env.items():
        literal = is_secret(name) and not REFERENCE.fullmatch(value)
        kept[name] = f"${{{name}}}" if literal or mask_text(value) != value else value
    return kept, [name for value in kept.values() for name in REFERENCE.findall(value)]


def is_folder(path: str) -> bool:
    """Whether a checkpoint is a folder of the host, neither built in nor a name on the hub."""
    return not path.startswith(BUILTIN) and (path.startswith(("/", ".")) or Path(path).exists())


def cache_names(inside: LoadedProfile) -> dict[str, str]:
    """Variable -> folder of each cache that the profile does not place itself."""
    variables = ["HF_HOME", *cache_folders({})]
    if inside.profile.hardware.platform != "rocm":
        variables.remove("AITER_JIT_DIR")
    env = inside.profile.engine.env
    return {name: name.partition("_")[0].lower() for name in variables if name not in env}


def refuse_other_secrets(inside: LoadedProfile, extra: Sequence[str]) -> None:
    """Raise InputError where a secret would stand in the rendered file."""
    faults = [
        f"{inside.where(*path)}: {dotted(path)} holds a secret, which a rendered file would show to all; "
        f"take it out, and give it to the engine by a variable in engine.env"
        for path in _secrets(inside.values, redacted(inside.values))
        if path[:2] != ("engine", "env")
    ]
    if redacted_command(list(extra)) != list(extra):
        faults.append("a flag after -- holds a secret, which a rendered file would show; use engine.env")
    if faults:
        raise InputError(faults)


def _secrets(value: Any, shown: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The paths of texts that redaction changes; a number under a name like `num_key_heads` is no secret."""
    if isinstance(value, dict):
        for key, inner in value.items():
            below = shown[key] if isinstance(shown, dict) else shown
            yield from _secrets(inner, below, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _secrets(inner, shown[i] if isinstance(shown, list) else shown, (*path, i))
    elif isinstance(value, str) and value != shown:
        yield path
