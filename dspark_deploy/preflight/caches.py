"""Where compilers keep what they compiled: free space, network file systems, locks that nobody holds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field

NETWORK = {
    "nfs",
    "nfs4",
    "lustre",
    "ceph",
    "cifs",
    "smb3",
    "smbfs",
    "gpfs",
    "beegfs",
    "fuse.sshfs",
    "9p",
    "wekafs",
}
# The longest compile known is AITER's module of 225 s; a lock untouched for longer than this has no owner.
STALE_LOCK_S = 1800
DEPTH = 3


@dataclass(frozen=True, slots=True)
class Cache:
    """One folder: `variable` names it, `network` is its file system where that is one of a network."""

    variable: str
    path: str
    free_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    network: str = ""
    stale_locks: list[str] = field(default_factory=list)


def cache_folders(environment: Mapping[str, str]) -> dict[str, Path]:
    """Variable -> folder of vLLM, TileLang, Triton and AITER: as `environment` says, else by default."""
    home = Path(environment.get("HOME", "~")).expanduser()
    defaults = {
        "VLLM_CACHE_ROOT": home / ".cache" / "vllm",
        "TILELANG_CACHE_DIR": home / ".tilelang" / "cache",
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "AITER_JIT_DIR": home / ".aiter" / "jit",
    }
    return {name: Path(environment.get(name) or default) for name, default in defaults.items()}


def probe_caches(environment: Mapping[str, str]) -> list[Cache]:
    """What is to be known of each folder of `cache_folders`."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return [_cache(name, path, mounts) for name, path in cache_folders(environment).items()]


def _cache(variable: str, path: Path, mounts: dict[str, str]) -> Cache:
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free / (1 << 30)
    above = [str(place) for place in (existing.absolute(), *existing.absolute().parents)]
    filesystem = next((mounts[place] for place in above if place in mounts), "")
    return Cache(
        variable,
        str(path),
        round(free, 1),
        filesystem if filesystem in NETWORK else "",
        _stale_locks(path) if path.is_dir() else [],
    )


def _stale_locks(folder: Path) -> list[str]:
    """Lock files untouched for `STALE_LOCK_S`, not deeper than `DEPTH` folders."""
    before = time.time() - STALE_LOCK_S
    patterns = ["*/" * depth + name for depth in range(DEPTH + 1) for name in ("lock_*", "*.lock", "lock")]
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    stale = []
    for path in sorted(found):
        try:
            if path.is_file() and path.stat().st_mtime < before:
                stale.append(str(path))
        except FileNotFoundError:  # its owner has just let it go
            continue
    return stale
