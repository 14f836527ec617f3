"""The engine's log: followed while it grows, and searched for the lines that say why it died."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

CHUNK = 64 * 1024
# An engine that writes faster than anybody reads: what is further behind is only in the file.
MOST_BEHIND = 16 << 20
MOST_LINE = 1 << 20
# What vLLM puts before each line: process and location, or only the process, or nothing.
PREFIX = re.compile(r"^(?:\([^)]*\) ?)?(?:ERROR\s.*?\] ?)?")
CAUSE = re.compile(
    r"^\s*(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Refused|Interrupt)\b"
    r"|\berror: |[Oo]ut of memory|\bKilled\b|[Ss]egmentation fault"
)
UNHELPFUL = re.compile(
    r"Engine core initialization failed|Engine process failed|See root cause above|For further information"
)
# What Python and Triton say of themselves on the way out, after the cause.
NOISE = re.compile(r"leaked|nanobind|resource_tracker|skipped remainder")
CONTINUATION_LINES = 3


class LogFollower:
    """Reads the lines that were added since it last looked. Its memory is bounded, whatever is written.

    A file that has become shorter was rotated by copying and truncating it; it is read from its start.
    """

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
            end = handle.seek(0, 2)
            if end < self._offset:
                self._offset, self._rest = 0, b""
            if end - self._offset > MOST_BEHIND:
                lines.append(f"[{end - self._offset - MOST_BEHIND} bytes of the log are not shown]")
                self._offset, self._rest = end - MOST_BEHIND, b""
            handle.seek(self._offset)
            while self._offset < end and (chunk := handle.read(min(CHUNK, end - self._offset))):
                self._offset += len(chunk)
                *complete, rest = chunk.split(b"\n")
                if complete:
                    complete[0] = self._rest + complete[0]
                    self._rest = rest
                else:
                    self._rest += rest
                if len(self._rest) > MOST_LINE:
                    complete.append(self._rest)
                    self._rest = b""
                lines += [line.decode("utf-8", "replace").rstrip("\r") for line in complete]
        return lines


def log_lines(path: Path) -> Iterator[str]:
    """The lines of a whole log, one at a time; of a line beyond a megabyte, pieces. Raises OSError."""
    if path.exists() and not path.is_file():  # a FIFO or a device may never end
        raise OSError(errno.EINVAL, "is not a regular file; save the log into a file, and name that")
    with path.open("rb") as handle:
        while line := handle.readline(MOST_LINE):
            yield line.decode("utf-8", "replace").rstrip("\r\n")


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
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not NOISE.search(line)]
    causes: list[str] = []
    following = 0  # an exception's text may go on in lines that are indented
    for line in lines:
        text = PREFIX.sub("", line)
        is_cause = CAUSE.search(text) is not None
        continues = following > 0 and text[:1].isspace() and not text.lstrip().startswith(("File ", "^"))
        following = CONTINUATION_LINES if is_cause else following - 1 if continues else 0
        if (is_cause or continues) and not UNHELPFUL.search(text) and text.strip() not in causes:
            causes.append(text.strip())
    return [line[:400] for line in (causes[-most:] or lines[-most:])]
