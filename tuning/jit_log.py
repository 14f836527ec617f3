"""Reads a server's log: which kernels were compiled when, who waited for a lock, and which key was missed.

    dspark-tune jit-log runs/20261202-081106-mi355x/engine.log

Lines of our own capture guard name library, kernel, key, token count and phase. In a log without them, the
lines of TileLang, AITER and vLLM's monitor are counted, in the phase that vLLM's own lines show; these name
no key. Waits for a lock are AITER's: one process builds, the others wait.

Not covered: compiles that no library writes a line about, as Triton's outside vLLM's monitor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_deploy.errors import InputError
from dspark_deploy.launch.log import log_lines

GUARD_LINE = "dspark-deploy jit: library="
PHASES = ("load", "warm-up", "capture", "serving")
OURS = re.compile(
    r"dspark-deploy jit: library=(?P<library>\S+) kernel=(?P<kernel>\S+) phase=(?P<phase>\S+) "
    r"tokens=(?P<tokens>\d{1,18}) seconds=(?P<seconds>[\d.]+) source=(?P<source>\S+) "
    r"key=(?P<key>.*?)(?P<refused> refused=1)?$"
)
THEIRS = (
    ("tilelang", re.compile(r"TileLang begins to compile kernel `(?P<kernel>[^`]+)`")),
    ("aiter", re.compile(r"start build \[(?P<kernel>[^\]]+)\]")),
    ("triton", re.compile(r"Triton kernel JIT compilation during inference: (?P<kernel>[^\s.(]+)")),
)
LOCK = re.compile(r"waiting for baton release at (?P<lock>\S+)")
# A line of vLLM's that shows the phase that begins with it.
BEGINS = (
    ("warm-up", re.compile(r"Model loading took")),
    ("capture", re.compile(r"Capturing CUDA graphs")),
    ("warm-up", re.compile(r"Graph capturing finished")),
    ("serving", re.compile(r"Application startup complete")),
)


@dataclass(slots=True)
class JitLog:
    """`compiles[phase][library]` counts compiles, loads from disk apart; `missing` are those of capture and
    serving, each with what the line tells; `locks` counts waits by lock."""

    compiles: dict[str, Counter[str]] = field(default_factory=lambda: {phase: Counter() for phase in PHASES})
    from_disk: int = 0
    refused: int = 0
    locks: Counter[str] = field(default_factory=Counter)
    missing: list[dict[str, Any]] = field(default_factory=list)
    guarded: bool = False

    def as_json(self) -> dict[str, Any]:
        """The classification as plain JSON values."""
        return {
            "compiles": {phase: dict(counts) for phase, counts in self.compiles.items()},
            "from_disk": self.from_disk,
            "refused": self.refused,
            "lock_waits": dict(self.locks),
            "missing": self.missing,
            "guarded": self.guarded,
        }


def read_log(path: Path) -> JitLog:
    """Classify the log at `path`. Raises InputError for a file that can't be read."""
    try:
        guarded = any(GUARD_LINE in line for line in log_lines(path))
        return _classify(log_lines(path), guarded)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def classify(lines: list[str]) -> JitLog:
    """Classify the lines of one server's log."""
    return _classify(lines, any(GUARD_LINE in line for line in lines))


def _classify(lines: Iterable[str], guarded: bool) -> JitLog:
    log = JitLog(guarded=guarded)
    phase = "load"
    for line in lines:
        phase = next((name for name, pattern in BEGINS if pattern.search(line)), phase)
        waited = LOCK.search(line)
        if waited:
            log.locks[waited["lock"].rpartition("/")[2]] += 1
        if log.guarded:
            _ours(log, line)
        else:
            _theirs(log, line, phase)
    return log


def _ours(log: JitLog, line: str) -> None:
    found = OURS.search(line)
    if found is None:
        return
    if found["refused"]:
        log.refused += 1
    elif found["source"] == "disk":
        log.from_disk += 1
    else:
        log.compiles.setdefault(found["phase"], Counter())[found["library"]] += 1
    if found["phase"] in ("capture", "serving"):
        log.missing.append(
            {
                "phase": found["phase"],
                "library": found["library"],
                "kernel": found["kernel"],
                "key": found["key"],
                "tokens": int(found["tokens"]),
            }
        )


def _theirs(log: JitLog, line: str, phase: str) -> None:
    for library, pattern in THEIRS:
        found = pattern.search(line)
        if found is None:
            continue
        log.compiles[phase][library] += 1
        if phase in ("capture", "serving"):
            unknown = {"key": "not in this log", "tokens": 0}
            log.missing.append({"phase": phase, "library": library, "kernel": found["kernel"], **unknown})
