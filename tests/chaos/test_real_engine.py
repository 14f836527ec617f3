"""The real CPU engine killed in the middle of a request and of a measurement: state, exit code, no orphan.

What goes wrong in ways that a real engine can't be made to has stand-ins, in the files beside. Three boots.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.commands import SWEEP, Command, whole

pytestmark = pytest.mark.engine

HUGE = 10 << 30
ANSWERED = "POST /v1/completions"  # in the engine's own log
QUICK = ["--set", "engine.stop_timeout_s=5"]


def engine_worker(command: Command) -> tuple[psutil.Process, list[psutil.Process]]:
    """The process that runs the model, and every process below the command."""
    family = psutil.Process(command.process.pid).children(recursive=True)
    (worker,) = [each for each in family if each.name().startswith("VLLM::Worker")]
    return worker, family


def gone(family: list[psutil.Process]) -> bool:
    """Whether they all end soon."""
    return not psutil.wait_procs(family, timeout=20)[1]


def test_killed_in_the_middle_of_a_request_beside_a_log_of_ten_gigabytes(tmp_path: Path) -> None:
    serve = ["--profile", "cpu-tiny.yaml", "--quiet", "--set", "engine.port=0", *QUICK]
    command = Command(tmp_path, "serve", *serve, real=True)
    command.wait_for('"ready"', 240)
    url = json.loads(command.stdout().splitlines()[0])["url"]
    (log,) = tmp_path.glob("runs/*/engine.log")
    os.truncate(log, HUGE)  # a hole takes no disk, and reads like any other text
    answered: list[str] = []

    def ask() -> None:
        body = {"model": "tiny", "prompt": "Q:", "max_tokens": 200, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                answered.extend(reply.iter_lines())
        except httpx.HTTPError:
            answered.append("cut off")

    worker, family = engine_worker(command)
    before = psutil.Process(command.process.pid).memory_info().rss
    client = threading.Thread(target=ask)
    client.start()
    while len(answered) < 4 and client.is_alive():
        time.sleep(0.01)
    worker.kill()
    peak = before
    while command.process.poll() is None:
        try:
            peak = max(peak, psutil.Process(command.process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    ended = command.end()
    client.join()
    assert (ended.code, ended.document["exit_code"]) == (6, 6), ended.stderr
    assert "after it had been ready" in ended.document["error"]
    assert any("EngineCore" in line or line == "cut off" for line in answered), "it was in the middle"
    assert gone(family)
    assert log.stat().st_size > HUGE, "the engine wrote on behind the hole"
    assert peak - before < 256 << 20, "the log was not read whole"
    whole(tmp_path)


def test_killed_in_the_middle_of_a_measurement_and_measured_again(tmp_path: Path) -> None:
    sweep = [*SWEEP, *QUICK, "--prompts-per-load", "24"]
    command = Command(tmp_path, "tune", *sweep, real=True)
    command.wait_for("none: load 1", 240)
    log = tmp_path / "out" / "cells" / "none" / "engine.log"
    warmed = log.read_text().count(ANSWERED)
    while log.read_text().count(ANSWERED) == warmed:
        time.sleep(0.02)
    worker, family = engine_worker(command)
    worker.kill()
    ended = command.end()
    assert ended.code == 6, ended.stderr
    assert gone(family)
    with sqlite3.connect(tmp_path / "out" / "study.db") as database:
        assert database.execute("select state from trials").fetchall() == [("FAIL",)]
    whole(tmp_path)
    again = Command(tmp_path, "tune", *sweep, "--retry-failed", real=True).end(240)
    assert again.code == 0, again.stderr
    (cell,) = again.document["cells"]
    assert cell["state"] == "complete" and [load["requests"] for load in cell["loads"]] == [24]
    whole(tmp_path)
