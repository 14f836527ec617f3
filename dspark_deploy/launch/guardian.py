"""Runs one command, and makes sure that nothing of it outlives us.

    python -I guardian.py FD SECONDS -- COMMAND [ARG ...]

FD is the reading end of a pipe whose other end only our command holds. When that end closes, by an orderly
stop or because our command was killed by SIGKILL, the guardian ends every process that the command started:
SIGTERM, SECONDS of grace or until all that the command had started is gone, SIGKILL. It is a subreaper
(Linux), so processes that detach from their parent become its children and are found as well. It exits with
the command's code, or 128 plus its signal.

Standard library only: it starts in 20 ms and stays small beside the engine. Not covered: a guardian that is
itself killed by SIGKILL; the command then gets SIGTERM from the kernel (PR_SET_PDEATHSIG), its children not.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
LONE_S = 1.0  # from the end of all that a command had started to its own, if it doesn't come


def main(argv: list[str]) -> int:
    """Run `argv`: descriptor, grace in seconds, `--`, command. Returns the command's exit code."""
    descriptor, grace, command = int(argv[0]), float(argv[1]), argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Signals are for the command that started us: it closes the pipe when it wants an end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: _prepare(libc))
    while child.poll() is None:
        readable, _, _ = select.select([descriptor], [], [], POLL_S)
        if readable and not os.read(descriptor, 1):
            break
    _end(child, grace)
    code = child.returncode
    return 128 - code if code < 0 else code


def _prepare(libc: ctypes.CDLL) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    """End the command and everything below this process, then reap what was left to us."""
    if child.poll() is None:
        helped = _helpers(child)
        child.terminate()
        deadline, lone_since = time.monotonic() + grace, None
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            # A server whose engine is gone waits for answers that no longer come.
            if not helped or _helpers(child):
                lone_since = None
            elif lone_since is None:
                lone_since = time.monotonic()
            elif time.monotonic() - lone_since > LONE_S:
                break
    # The command had its chance to end its own children; what is left is asked once, then killed.
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + seconds
        asked: set[int] = set()
        while (left := _descendants()) and time.monotonic() < deadline:
            for pid in left - asked:
                _kill(pid, number)
            asked |= left
            _reap(child)
            time.sleep(POLL_S)
    child.wait()


def _descendants() -> set[int]:
    """Every living process below this one, by parentage; zombies do not count."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold spaces; state and parent follow the last one.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it ended while we looked
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found: set[int] = set()
    front = {os.getpid()}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front} - found
        found |= front
    return found


def _helpers(child: subprocess.Popen[bytes]) -> set[int]:
    """What the command has started, but for Python's tracker of shared memory, which ends with its owner."""
    found = _descendants() - {child.pid}
    return {pid for pid in found if b"multiprocessing.resource_tracker" not in _command_line(pid)}


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended while we looked
        return b""


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collect orphans that were handed to us, and leave the command itself to its Popen object."""
    child.poll()
    while True:
        try:
            done = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if done is None or done.si_pid == child.pid:
            return
        os.waitpid(done.si_pid, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
