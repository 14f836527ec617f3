"""`dspark-serve` as a child process, waited for until it is ready, and looked at afterwards.

`DSPARK_ENGINE_TESTS_SET=path=value` in the environment is one more `--set` for every engine of these tests;
`bench/cpu_before_after.py` times them so with the kernel twins switched off.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_TIMEOUT_S = 300
EXTRA_SET = (
    ["--set", os.environ["DSPARK_ENGINE_TESTS_SET"]] if "DSPARK_ENGINE_TESTS_SET" in os.environ else []
)


class Served:
    """One `dspark-serve --json`. `ready` is its document at readiness."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._stdout = folder / "stdout"
        self.stderr = folder / "stderr"
        command = [sys.executable, "-m", "dspark_deploy.serve", "--profile", "cpu-tiny.yaml"]
        command += ["--set", "engine.port=0", "--json", "--quiet", *EXTRA_SET, *arguments]
        with self._stdout.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err)
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Wait for the document that says ready."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            documents = self.documents()
            if documents:
                self.ready = documents[0]
                assert self.ready["status"] == "ready", self.ready
                return
            assert self.process.poll() is None, self.stderr.read_text()
            time.sleep(0.2)
        raise AssertionError(f"not ready within {READY_TIMEOUT_S} s:\n{self.stderr.read_text()}")

    def documents(self) -> list[dict[str, Any]]:
        """The JSON documents on stdout so far."""
        return [json.loads(line) for line in self._stdout.read_text().splitlines()]

    def family(self) -> list[psutil.Process]:
        """Every process below the command."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def client(self) -> httpx.Client:
        """A client of the engine."""
        return httpx.Client(base_url=self.ready["url"], timeout=120)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(90)


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Served]:
    """A ready server; whatever the test does, it is stopped."""
    server = Served(folder, *arguments)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


def all_gone(processes: list[psutil.Process], seconds: float = 60) -> bool:
    """Whether all of them end within the time."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not alive
