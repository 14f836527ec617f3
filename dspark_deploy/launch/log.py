"""The engine's log: followed while it grows, and searched for the lines that say why it died."""

from __future__ import annotations

import re
from pathlib import Path

CHUNK = 64 * 1024
# vLLM prefixes every line with process and location; the cause follows that, usually an exception's name.
CAUSE = re.compile(
    r"^(?:\([^)]*\)\s*)?(?:ERROR\s.*?\]\s*)?\s*"
    r"((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Refused|Interrupt)\b.*"
    r"|.*\berror: .*|.*[Oo]ut of memory.*|.*Killed.*|.*[Ss]egmentation fault.*)$"
)
UNHELPFUL = ("Engine core initialization failed", "Engine process failed", "See root cause above")


class LogFollower:
    """Reads the lines that were added since it last looked, at most one chunk at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Complete lines since the last call; an unfinished last line waits for its end."""
        lines: list[str] = []
        if not self._path.exists():
            return lines
        with self._path.open("rb") as handle:
            handle.seek(self._offset)
            while chunk := handle.read(CHUNK):
                self._offset += len(chunk)
                *complete, self._rest = (self._rest + chunk).split(b"\n")
                lines += [line.decode("utf-8", "replace").rstrip("\r") for line in complete]
        return lines


def meaningful_lines(path: Path, most: int = 12) -> list[str]:
    """The lines of a log that say why the engine ended: causes first seen, else simply its last lines.

    Reads at most the last megabyte, so that the size of a log does not matter.
    """
    try:
        with path.open("rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - 1_000_000))
            text = handle.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    causes: list[str] = []
    for line in lines:
        match = CAUSE.match(line)
        cause = match.group(1).strip() if match else ""
        if cause and cause not in causes and not any(phrase in cause for phrase in UNHELPFUL):
            causes.append(cause)
    return [line[:400] for line in (causes[-most:] or lines[-most:])]
