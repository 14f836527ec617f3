"""The commands themselves stopped or killed: exit code, no orphan, no half file, and a sweep goes on."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from bench.kill9 import run
from tests.support.commands import QUICK, SWEEP, Command, leftovers, whole

SERVE = ["--profile", "cpu-tiny.yaml", "--set", "engine.port=0", *QUICK]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_serve_with_130(tmp_path: Path, number: signal.Signals) -> None:
    fault = {"fault": "hang at shutdown" if number is signal.SIGTERM else "none"}
    command = Command(tmp_path, "serve", *SERVE, bad=fault)
    command.wait_for('"ready"')
    assert len(leftovers(tmp_path, 0)) == 4, "command, guardian, server, worker"
    command.process.send_signal(number)
    ended = command.end()
    assert (ended.code, ended.document["status"]) == (130, "interrupted")
    assert f"stopped by {number.name}" in ended.stderr
    whole(tmp_path)


def test_a_signal_while_the_engine_starts(tmp_path: Path) -> None:
    command = Command(tmp_path, "serve", *SERVE, bad={"fault": "hang at start"})
    command.wait_for("run directory")
    command.process.send_signal(signal.SIGHUP)
    assert command.end().code == 130


def test_two_signals_end_at_once_and_leave_nothing(tmp_path: Path) -> None:
    slow = ["--set", "engine.stop_timeout_s=5"]
    command = Command(tmp_path, "serve", *SERVE, *slow, bad={"fault": "hang at shutdown"})
    command.wait_for('"ready"')
    command.process.send_signal(signal.SIGTERM)
    command.wait_for("it has up to 5 s (engine.stop_timeout_s)", 3)
    with pytest.raises(subprocess.TimeoutExpired):
        command.process.wait(0.5)
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(2) == -signal.SIGTERM
    assert leftovers(tmp_path) == [], "the guardian has ended them"


def test_sigkill_of_serve_leaves_nothing(tmp_path: Path) -> None:
    command = Command(tmp_path, "serve", *SERVE)
    command.wait_for('"ready"')
    command.process.kill()
    command.process.wait()
    assert leftovers(tmp_path) == []
    whole(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_sweep_in_a_measurement(tmp_path: Path, number: signal.Signals) -> None:
    command = Command(tmp_path, "tune", *SWEEP, *QUICK, bad={"fault": "silent metrics"})
    command.wait_for("none: load 1")
    command.process.send_signal(number)
    ended = command.end()
    assert (ended.code, ended.document["status"]) == (130, "interrupted")
    assert f"stopped by {number.name}" in ended.stderr
    whole(tmp_path)


def test_a_sweep_that_is_interrupted_says_so_and_owes_the_trial(tmp_path: Path) -> None:
    command = Command(tmp_path, "tune", *SWEEP, *QUICK, bad={"fault": "hang at start"})
    command.wait_for("booting the engine")
    second = tmp_path / "second"
    second.mkdir()
    (second / "out").symlink_to(tmp_path / "out")
    refused = Command(second, "tune", *SWEEP, *QUICK).end()
    assert refused.code == 2 and "another sweep is running in it" in refused.stderr
    command.process.send_signal(signal.SIGTERM)
    ended = command.end()
    assert ended.code == 130 and "it has up to 1 s (engine.stop_timeout_s)" in ended.stderr
    # The same command goes on with that trial: it fails now by its own fault, and no longer for the signal.
    again = Command(tmp_path, "tune", *SWEEP, *QUICK, bad={"fault": "exit at load"}).end()
    assert again.code == 5, again.stderr
    whole(tmp_path)


def test_kill_9_in_brief() -> None:
    """`bench/kill9.py` at four moments of its fifty."""
    found = run(kills=4, seed=11)
    assert found["good"], json.dumps(found)
