"""Every failure a person can cause or meet, as one tree; the exit code belongs to the class.

    DSparkError                    1   a fault of ours
    ├── InputError                 2   profile, flag or file that cannot be used
    ├── PreflightRefused           3   this launch would fail, and why
    ├── NumericsRefused            4   an mHC operator of this engine is wrong
    ├── EngineError
    │   ├── EngineStartError       5   the engine died or hung before it was ready
    │   └── EngineDiedError        6   the engine died after it was ready
    ├── FileError                  1   a file of ours cannot be written: disk, permissions
    ├── MeasurementError           1   a load, a scrape or an accuracy run that gives no number
    ├── GateFailed                 7   a gate saw what it is there to stop
    │   └── AccuracyConstraintFailed   no measured configuration kept its accuracy
    └── Interrupted              130   stopped by a signal

`docs/exit-codes.md` says what to do about each.
"""

from __future__ import annotations

from typing import Any


class DSparkError(Exception):
    """Base of the tree. `str(error)` is the whole message for the person at the terminal."""

    exit_code = 1
    # What a script gets beside status, exit code and message, in the JSON document.
    document: dict[str, Any] = {}  # noqa: RUF012


class InputError(DSparkError):
    """Input that cannot be used. Holds every fault found, one per line, so that one run shows them all."""

    exit_code = 2

    def __init__(self, faults: str | list[str]) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class PreflightRefused(DSparkError):
    """The preflight found at least one error; the findings were printed before this was raised."""

    exit_code = 3

    def __init__(self, message: str, findings: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.document = {"findings": findings}


class NumericsRefused(DSparkError):
    """The numerics gate refused. `reports` are the sections `numerics` of the engine's processes."""

    exit_code = 4

    def __init__(self, message: str, reports: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.document = {"numerics": reports}


class EngineError(DSparkError):
    """The engine failed. Carries the last meaningful lines of its log."""

    def __init__(self, message: str, log_lines: list[str] | None = None) -> None:
        self.log_lines = list(log_lines or [])
        tail = "\n".join(f"    {line}" for line in self.log_lines)
        super().__init__(f"{message}\n  engine log, the lines that matter:\n{tail}" if tail else message)


class EngineStartError(EngineError):
    """The engine exited, or was not ready within its time."""

    exit_code = 5


class EngineDiedError(EngineError):
    """The engine exited after it had been ready."""

    exit_code = 6


class FileError(DSparkError):
    """A file cannot be written. The message names it and says why."""


class MeasurementError(DSparkError):
    """A measurement broke off, or contradicts itself: there is no number, and none is made up."""


class GateFailed(DSparkError):
    """A gate has seen what it is there to stop. `document` holds what it saw, whole."""

    exit_code = 7

    def __init__(self, message: str, document: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.document = document or {}


class AccuracyConstraintFailed(GateFailed):
    """The sweep ended, and no configuration with speculation kept its accuracy."""


class Interrupted(DSparkError):
    """A signal asked us to stop; everything we started has been stopped."""

    exit_code = 130
