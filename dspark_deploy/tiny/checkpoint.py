"""Find the built-in checkpoints, and check that their files are the ones that were trained.

    from dspark_deploy.tiny.checkpoint import checkpoint_path, verify
    checkpoint_path("tiny-qwen3/target")      # a folder that vLLM loads

A checkpoint is a folder with a MANIFEST.json that gives size and SHA-256 of every other file in it. That
guards against damage, not against someone who rewrites the manifest as well. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_deploy.errors import InputError

WEIGHTS = Path(__file__).parent / "weights"
MANIFEST = "MANIFEST.json"
FORMAT = 1


def builtin_names() -> list[str]:
    """Every name that `checkpoint_path` takes, such as "tiny-qwen3/target"."""
    return sorted(str(path.parent.relative_to(WEIGHTS)) for path in WEIGHTS.glob("*/*/config.json"))


def checkpoint_path(name: str) -> Path:
    """The folder of a built-in checkpoint."""
    names = builtin_names()
    if name not in names:
        known = ", ".join(names) or "none; this installation lacks its weights"
        raise InputError(f"there is no built-in checkpoint {name!r}. Built in: {known}")
    return WEIGHTS / name


def verify(name: str) -> Path:
    """`checkpoint_path`, once the files there are known to be whole."""
    path = checkpoint_path(name)
    verify_folder(path.parent, path.name)
    return path


def verify_folder(root: Path, part: str = "") -> None:
    """Check the files of the checkpoint at `root`, or of one folder in it, against its manifest."""
    listed = {
        name: facts for name, facts in _listed_files(root).items() if not part or name.startswith(f"{part}/")
    }
    present = {str(path.relative_to(root)) for path in (root / part).rglob("*") if path.is_file()} - {
        MANIFEST
    }
    faults = [f"{root / name}: not in {MANIFEST}" for name in sorted(present - listed.keys())]
    for name, facts in sorted(listed.items()):
        if fault := _fault(root / name, facts):
            faults.append(f"{root / name}: {fault}")
    if not listed:
        faults.append(f"{root / MANIFEST}: lists no files{f' under {part}' if part else ''}")
    if faults:
        raise InputError([*faults, f"{root}: damaged. Install the package again, or train again."])


def write_manifest(root: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of the checkpoint at `root`: `facts` about it, and its files."""
    files = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path != root / MANIFEST):
        data = path.read_bytes()
        files[str(path.relative_to(root))] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format": FORMAT, **facts, "files": files}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _listed_files(root: Path) -> dict[str, dict[str, Any]]:
    path = root / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: missing") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{path}: format is {manifest.get('format')!r}, and this version reads {FORMAT} only"
        )
    return manifest["files"]


def _fault(path: Path, facts: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return "missing"
    data = path.read_bytes()
    if len(data) != facts["bytes"]:
        return f"{len(data)} bytes, where {MANIFEST} says {facts['bytes']}"
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        return f"its contents are not those that {MANIFEST} gives the SHA-256 of"
    return None
