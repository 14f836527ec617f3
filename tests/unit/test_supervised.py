"""Nothing that a command started outlives us: not after a stop, not after SIGKILL, not when it detaches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dspark_deploy.launch.supervised import Supervised

# Starts a grandchild in a session of its own, which ignores SIGTERM, and says both numbers.
STUBBORN = """
import os, signal, subprocess, sys, time
inner = '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, '-c', inner], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
{then}
"""
WAIT = "time.sleep(600)"
LEAVE = "os._exit(3)"


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def start(folder: Path, then: str, grace_s: float = 1) -> tuple[Supervised, list[int]]:
    log = folder / "log"
    command = [sys.executable, "-c", STUBBORN.format(then=then)]
    process = Supervised(command, dict(os.environ), log, grace_s)
    assert eventually(lambda: log.exists() and len(log.read_text().split()) == 2), log.read_text()
    return process, [int(word) for word in log.read_text().split()]


def gone(pids: list[int]) -> bool:
    return not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # at any moment, between two questions too
        return False


def test_stop_ends_a_detached_process_that_ignores_sigterm(tmp_path: Path) -> None:
    process, pids = start(tmp_path, WAIT)
    assert not gone(pids[:1]) and not gone(pids[1:])
    assert process.stop() == 128 + signal.SIGTERM
    assert gone(pids)
    assert process.stop() == 128 + signal.SIGTERM, "stopping twice is harmless"


LONELY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
signal.signal(signal.SIGTERM, lambda *_: child.{end}())
print(os.getpid(), child.pid, flush=True)
while True:
    time.sleep(0.1)
    child.poll()
"""


@pytest.mark.parametrize(("end", "seconds"), [("kill", (1, 9)), ("poll", (9, 20))])
def test_a_command_that_waits_for_nothing_is_not_waited_for(
    tmp_path: Path, end: str, seconds: tuple[float, float]
) -> None:
    """A server whose engine is gone; and one whose engine is there still, which has all of its time."""
    log = tmp_path / "log"
    process = Supervised([sys.executable, "-c", LONELY.format(end=end)], dict(os.environ), log, 9)
    assert eventually(lambda: log.exists() and len(log.read_text().split()) == 2)
    started = time.monotonic()
    process.stop()
    assert seconds[0] < time.monotonic() - started < seconds[1]
    assert gone([int(word) for word in log.read_text().split()])


def test_a_command_that_leaves_its_child_behind(tmp_path: Path) -> None:
    process, pids = start(tmp_path, LEAVE)
    assert eventually(lambda: process.poll() is not None)
    assert process.poll() == 3, "the command's own exit code"
    assert gone(pids)


def test_sigkill_of_the_parent_ends_everything(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from dspark_deploy.launch.supervised import Supervised\n"
        f"command = [sys.executable, '-c', {STUBBORN.format(then=WAIT)!r}]\n"
        f"Supervised(command, os.environ, Path({str(log)!r}), 1)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    assert eventually(lambda: log.exists() and len(log.read_text().split()) == 2)
    pids = [int(word) for word in log.read_text().split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: gone(pids))


def test_signals_to_our_group_leave_the_guardian_to_do_its_work(tmp_path: Path) -> None:
    process, pids = start(tmp_path, WAIT)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None and not gone(pids)
    process.stop()
    assert gone(pids)


def test_output_goes_to_the_log_and_the_code_comes_back(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"]
    with Supervised(command, dict(os.environ), log) as process:
        assert process.wait(20) == 7
    assert sorted(log.read_text().split()) == ["err", "out"]


def test_a_log_that_cannot_be_opened_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Supervised([sys.executable, "-c", ""], dict(os.environ), tmp_path / "no" / "log")
