"""Reads a server's log: which kernels were compiled when, who waited for a lock, and which key was missed.

    dspark-tune jit-log runs/20261202-081106-mi355x/engine.log

Lines of our own capture guard name library, kernel, key, token count and phase. In a log without them, the
lines of TileLang, AITER and vLLM's monitor are counted, in the phase that vLLM's own lines show; these name
no key and no time. Waits for a lock are AITER's: one process builds, the others wait. A file without any line
of a vLLM server is refused, since it would be taken for a log without compiles.

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
    r"tokens=(?P<tokens>\d{1,18}) seconds=(?P<seconds>\d{1,9}(?:\.\d{1,9})?) source=(?P<source>\S+) "
    r"key=(?P<key>.*?)(?P<refused> refused=1)?$"
)
THEIRS = (
    ("tilelang", re.compile(r"TileLang begins to compile kernel `(?P<kernel>[^`]+)`")),
    ("aiter", re.compile(r"start build \[(?P<kernel>[^\]]+)\]")),
    ("triton", re.compile(r"Triton kernel JIT compilation during inference: (?P<kernel>[^\s.(]+)")),
)
# How vLLM's own logger begins a line: level, date, time and place.
VLLM = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[")
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
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
    """`compiles[phase][library]` counts compiles, loads from disk apart; `locks` counts waits by lock.

    `missing` are the keys of capture and serving, each once by phase and `source` (`compiled`, `disk` or
    `refused`): `times` says in how many lines, `seconds` is the longest of them, None where no line tells,
    and `tokens` the first's, 0 where it can't be told. `is_server` is False without a line of a vLLM server.
    """

    compiles: dict[str, Counter[str]] = field(default_factory=lambda: {phase: Counter() for phase in PHASES})
    from_disk: int = 0
    refused: int = 0
    locks: Counter[str] = field(default_factory=Counter)
    missing: list[dict[str, Any]] = field(default_factory=list)
    guarded: bool = False
    is_server: bool = False

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
    """Classify the log at `path`. Raises InputError for what can't be read, or is no log of a vLLM server."""
    try:
        guarded = any(GUARD_LINE in line for line in log_lines(path))
        log = _classify(log_lines(path), guarded)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if not log.is_server:
        raise InputError(
            f"{path}: no line of a vLLM server in this file; name the engine.log of a run directory, or what "
            f"the server wrote, as plain UTF-8 text (not packed)"
        )
    return log


def classify(lines: list[str]) -> JitLog:
    """Classify the lines of one server's log."""
    return _classify(lines, any(GUARD_LINE in line for line in lines))


def report_lines(log: JitLog) -> list[str]:
    """The classification for people: every phase that is in the log, then locks and missed keys."""
    lines = []
    for phase, found in log.compiles.items():
        counts = ", ".join(f"{library} {count}" for library, count in sorted(found.items()))
        lines.append(f"{'after ready' if phase == 'serving' else phase:12} {counts or 'none'}")
    lines.append(f"from disk    {log.from_disk}, refused {log.refused}")
    lines += [f"lock wait    {lock}: {count}" for lock, count in sorted(log.locks.items())]
    for each in log.missing:
        seconds = "time unknown" if each["seconds"] is None else f"{each['seconds']:.2f} s"
        times = f" (longest of {each['times']})" if each["times"] > 1 else ""
        label = "from disk" if each["source"] == "disk" else "missed"
        lines.append(
            f"{label:12} {each['library']} {each['kernel']} in {each['phase']}, {each['source']}, "
            f"{seconds}{times}, {each['tokens']} tokens, key {each['key']}"
        )
    if not log.guarded:
        lines.append("no line of the capture guard is in this log: keys are unknown, Triton is incomplete")
    return lines


def _classify(lines: Iterable[str], guarded: bool) -> JitLog:
    log = JitLog(guarded=guarded)
    missing: dict[tuple[str, ...], dict[str, Any]] = {}
    phase = "load"
    for coloured in lines:
        line = ANSI.sub("", coloured)
        begun = next((name for name, pattern in BEGINS if pattern.search(line)), None)
        phase = begun or phase
        waited = LOCK.search(line)
        if waited:
            log.locks[waited["lock"].rpartition("/")[2]] += 1
        missed = _ours(log, line) if log.guarded else _theirs(log, line, phase)
        log.is_server = log.is_server or bool(begun or waited or missed or VLLM.search(line))
        if missed and missed["phase"] in ("capture", "serving"):
            _once(missing, missed)
    log.missing = list(missing.values())
    log.is_server = log.is_server or log.guarded
    return log


def _once(missing: dict[tuple[str, ...], dict[str, Any]], missed: dict[str, Any]) -> None:
    """Add a line's key, or count the line to the one that is there: ranks and restarts repeat it."""
    name = tuple(missed[part] for part in ("phase", "library", "kernel", "key", "source"))
    first = missing.setdefault(name, missed | {"times": 0})
    first["times"] += 1
    if missed["seconds"] is not None:
        first["seconds"] = max(first["seconds"], missed["seconds"])


def _ours(log: JitLog, line: str) -> dict[str, Any] | None:
    found = OURS.search(line)
    if found is None:
        return None
    source = "refused" if found["refused"] else found["source"]
    if source == "refused":
        log.refused += 1
    elif source == "disk":
        log.from_disk += 1
    else:
        log.compiles.setdefault(found["phase"], Counter())[found["library"]] += 1
    return {
        "phase": found["phase"],
        "library": found["library"],
        "kernel": found["kernel"],
        "key": found["key"],
        "tokens": int(found["tokens"]),
        "seconds": float(found["seconds"]),
        "source": source,
    }


def _theirs(log: JitLog, line: str, phase: str) -> dict[str, Any] | None:
    for library, pattern in THEIRS:
        found = pattern.search(line)
        if found is not None:
            log.compiles[phase][library] += 1
            unknown = {"key": "not in this log", "tokens": 0, "seconds": None, "source": "compiled"}
            return {"phase": phase, "library": library, "kernel": found["kernel"], **unknown}
    return None
