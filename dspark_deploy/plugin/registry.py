"""Patches of vLLM: each says what it looks for, is examined before it is installed, and ends in a state.

A patch is found applicable by the structure of its target, never by a version number. On any mismatch it
turns itself into a stated no-op. Nothing here runs per step: `apply` is called once per process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How a patch ended in one process."""

    APPLIED = "applied"
    UPSTREAM = "upstream"  # this vLLM already does it
    NOT_APPLICABLE = "not applicable"
    REFUSED = "refused"  # the target is there, and differs from what the patch was written for


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an examination found: `ready` to install, or the state the patch ends in and its reason.

    A refusal that isn't `fatal` leaves the process running though the patch is required.
    """

    state: State | None
    reason: str = ""
    fatal: bool = True


READY = Verdict(None)


def upstream(reason: str) -> Verdict:
    """This vLLM already has what the patch would bring."""
    return Verdict(State.UPSTREAM, reason)


def not_applicable(reason: str) -> Verdict:
    """There is nothing to patch here."""
    return Verdict(State.NOT_APPLICABLE, reason)


def refused(reason: str, fatal: bool = True) -> Verdict:
    """The target differs from what the patch was written for; `reason` names the difference."""
    return Verdict(State.REFUSED, reason, fatal)


@dataclass(frozen=True, slots=True)
class Patch:
    """One change to vLLM, or to a library under it, in this process.

    `target` names what is changed, `why` what an operator gains. `examine` returns READY or a verdict.
    `install` makes the change and returns its evidence: what can be seen to be different now.
    A patch that is `required` and refused stops the process, since the engine could not work without it,
    unless the verdict says otherwise.
    """

    name: str
    target: str
    why: str
    examine: Callable[[], Verdict]
    install: Callable[[], str]
    required: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """How one patch ended in this process, and the milliseconds of processor time that it took."""

    name: str
    target: str
    why: str
    state: State
    detail: str
    milliseconds: float

    def as_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)


class PatchRefusedError(RuntimeError):
    """A required patch was refused. The message names patch, target and difference."""


class Registry:
    """The patches of this process, each applied at most once, and their records in order."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    @property
    def records(self) -> list[Record]:
        """One record per patch, in the order of application."""
        return list(self._records.values())

    def apply(self, patches: Iterable[Patch]) -> None:
        """Examine and install each patch that has no record yet.

        Raises `PatchRefusedError` for a required patch that was refused, after every patch has its record.
        """
        fatal: list[str] = []
        for patch in patches:
            if patch.name in self._records:
                continue
            started = time.thread_time()
            verdict = patch.examine()
            if verdict.state is None:
                state, detail = State.APPLIED, patch.install()
            else:
                state, detail = verdict.state, verdict.reason
            elapsed = (time.thread_time() - started) * 1000
            self._records[patch.name] = Record(
                patch.name, patch.target, patch.why, state, detail, round(elapsed, 3)
            )
            if patch.required and state is State.REFUSED and verdict.fatal:
                fatal.append(f"dspark-deploy: patch {patch.name!r} on {patch.target} was refused: {detail}")
        if fatal:
            raise PatchRefusedError("\n".join(fatal))
