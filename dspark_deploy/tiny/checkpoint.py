"""Find the built-in checkpoints, and check that their files are the ones that were trained.

    from dspark_deploy.tiny.checkpoint import checkpoint_path, verify
    checkpoint_path("tiny-qwen3/target")      # a folder that vLLM loads

A checkpoint is a folder with a MANIFEST.json that gives size and SHA-256 of every other file in it. That
guards against damage, not against someone who rewrites the manifest as well. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dspark_deploy.errors import InputError

WEIGHTS = Path(__file__).parent / "weights"
MANIFEST = "MANIFEST.json"
FORMAT = 1


class FileFacts(NamedTuple):
    """What the manifest says of a file."""

    bytes: int
    sha256: str


def builtin_names() -> list[str]:
    """Every name that `checkpoint_path` takes, such as "tiny-qwen3/target"; one that lost a file has one."""
    configs = {path.relative_to(WEIGHTS) for path in WEIGHTS.rglob("config.json")}
    for manifest in WEIGHTS.glob(f"*/{MANIFEST}"):
        with contextlib.suppress(InputError):  # `verify` says what is wrong with it
            configs |= {manifest.parent.relative_to(WEIGHTS) / name for name in _listed(manifest.parent)}
    return sorted(path.parent.as_posix() for path in configs if path.name == "config.json")


def checkpoint_path(name: str) -> Path:
    """The folder of a built-in checkpoint."""
    names = builtin_names()
    if name not in names:
        known = ", ".join(names) or "none; this installation lacks its weights"
        raise InputError(f"there is no built-in checkpoint {name!r}. Built in: {known}")
    return WEIGHTS / name


def verify(name: str) -> Path:
    """`checkpoint_path`, once the files there are known to be whole. Raises InputError."""
    path = checkpoint_path(name)
    verify_folder(*_root_and_part(name))
    return path


def damage(name: str) -> list[str]:
    """What is wrong with a built-in checkpoint's files, one line each. Raises InputError for the name."""
    checkpoint_path(name)
    try:
        return _faults(*_root_and_part(name))
    except InputError as error:  # the manifest itself
        return error.faults


def _root_and_part(name: str) -> tuple[Path, str]:
    checkpoint, _, part = name.partition("/")
    return WEIGHTS / checkpoint, part


def verify_folder(root: Path, part: str = "") -> None:
    """Check the files of the checkpoint at `root`, or of the folder `part` in it, against its manifest.

    Raises InputError with every fault. Hidden files, which file managers leave, are nobody's weights.
    """
    if faults := _faults(root, part):
        raise InputError([*faults, f"{root}: damaged. Install the package again, or train again."])


def _faults(root: Path, part: str) -> list[str]:
    listed = {name: facts for name, facts in _listed(root).items() if not part or name.startswith(f"{part}/")}
    unknown = {path.relative_to(root).as_posix() for path in _files(root) if (root / part) in path.parents}
    faults = [f"{root / name}: not in {MANIFEST}; take it out" for name in sorted(unknown - listed.keys())]
    for name, facts in sorted(listed.items()):
        if fault := _fault(root / name, facts):
            faults.append(f"{root / name}: {fault}")
    if not listed:
        faults.append(f"{root / MANIFEST}: lists no files{f' under {part}' if part else ''}")
    return faults


def write_manifest(root: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of the checkpoint at `root`: `facts` about it, and its files."""
    files = {path.relative_to(root).as_posix(): _facts(path)._asdict() for path in _files(root)}
    manifest = {"format": FORMAT, **facts, "files": files}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _files(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*") if path.is_file() and path != root / MANIFEST)
    return sorted(path for path in found if not path.name.startswith("."))


def _facts(path: Path) -> FileFacts:
    data = path.read_bytes()
    return FileFacts(len(data), hashlib.sha256(data).hexdigest())


def _listed(root: Path) -> dict[str, FileFacts]:
    path = root / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise InputError(f"{path}: format {manifest['format']!r}, where this version reads {FORMAT} only")
        return {name: FileFacts(**facts) for name, facts in manifest["files"].items()}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a manifest: {error!r}") from None


def _fault(path: Path, expected: FileFacts) -> str | None:
    if not path.is_file():
        return "missing"
    found = _facts(path)
    if found.bytes != expected.bytes:
        return f"{found.bytes} bytes, where {MANIFEST} says {expected.bytes}"
    if found.sha256 != expected.sha256:
        return f"its SHA-256 is {found.sha256}, where {MANIFEST} says {expected.sha256}"
    return None
