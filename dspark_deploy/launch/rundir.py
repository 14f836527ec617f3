"""The run directory: everything needed to see again what was run, and how.

profile.yaml     the resolved profile          command.json   exact argv, redacted environment
settings.json    what the plugin is told       processes/     one report per vLLM process
engine.log       vLLM's output
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_deploy.errors import FileError, InputError


def write_atomically(path: Path, text: str, private: bool = False) -> None:
    """Write `text` so that a reader finds the old file or the new one, never half of one.

    A link is followed, and what is neither a file nor new is refused: a device would become a file. A
    `private` file is for its owner alone. Raises FileError.
    """
    try:
        path = path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError) as error:  # links in a circle
        raise FileError(f"{path}: cannot be written: {error}") from error
    if not path.name or (path.exists() and not path.is_file()):
        raise FileError(f"{path}: cannot be written: is a folder, a device or a pipe; name a file")
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as handle:
            if private:
                partial.chmod(0o600)
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # a disk that took no file may not give one back
            partial.unlink(missing_ok=True)


def discard_partial(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder. Only for who holds the folder alone."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """A folder that a person named, with those above it, unless it is there. Raises InputError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{path}: is in the way; it is not a folder") from error
    except OSError as error:
        raise InputError(f"{path}: no folder can be made there: {error.strerror}") from error


def refuse_unwritable(path: Path) -> None:
    """Before work whose outcome goes to the file `path`: makes its folder, tries it. Raises InputError."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is a folder, a device or a pipe; name a file")
    make_folder(path.parent)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"{path}: no file can be written there: {error.strerror}") from error


def fresh_folder(path: Path) -> None:
    """An empty folder, in the place of what an attempt that did not end has left. Raises FileError."""
    try:
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be made anew: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one engine's run."""

    path: Path

    @property
    def log(self) -> Path:
        """vLLM's stdout and stderr."""
        return self.path / "engine.log"

    @property
    def settings(self) -> Path:
        """What the plugin reads in each vLLM process."""
        return self.path / "settings.json"

    @property
    def processes(self) -> Path:
        """Where each vLLM process leaves its report."""
        return self.path / "processes"

    def write_json(self, name: str, document: Any, private: bool = False) -> None:
        """Write one JSON file into the directory."""
        text = json.dumps(document, indent=1, sort_keys=False) + "\n"
        write_atomically(self.path / name, text, private)


def new_run_directory(parent: Path, name: str) -> RunDirectory:
    """A fresh directory `parent/<time>-<name>`, never one that exists. Raises InputError."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        path = parent / (f"{stamp}-{name}" if attempt == 0 else f"{stamp}-{name}-{attempt}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)  # the engine's log holds whatever vLLM writes, prompts among it
        except FileExistsError:
            if not path.is_dir():
                raise InputError(f"{path}: is in the way; it is not a folder") from None
            continue
        except OSError as error:
            raise InputError(f"{path}: cannot be created: {error.strerror}") from error
        return RunDirectory(path)
    raise InputError(f"{parent}: a hundred runs began in this second; is something restarting in a loop?")
