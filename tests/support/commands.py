"""Both commands as processes, on the stand-in engine that goes wrong or on the real one, and what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MARK = "DSPARK_CHAOS_TEST"
SWEEP = ["sweep", "--profile", "cpu-tiny.yaml", "--num-speculative-tokens", "none", "--loads", "1"]
SWEEP += [
    "--prompts-per-load",
    "4",
    "--accuracy-problems",
    "4",
    "--boots",
    "0",
    "--no-report",
    "--out",
    "out",
]
QUICK = ["--set", "engine.stop_timeout_s=1"]


@dataclass
class Ended:
    """How a command ended. `document` is its last line of stdout."""

    code: int
    stderr: str
    document: dict[str, Any]
    seconds: float


class Command:
    """One command in a folder, on the stand-in engine unless `real`.

    Every process below it carries the folder's name in its environment, but for those of vLLM that write
    their title over it.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *arguments: str,
        bad: dict[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        real: bool = False,
    ) -> None:
        self.folder, self._started = folder, time.monotonic()
        environment = {**os.environ, **(env or {}), "BAD_ENGINE": json.dumps(bad or {}), MARK: str(folder)}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        end = arguments.index("--") if "--" in arguments else len(arguments)
        words = [*arguments[:end], "--json", *arguments[end:]]
        module = {"serve": "dspark_deploy.serve", "tune": "tuning.sweep"}[name]
        program = [module] if real else ["tests.support.bad_engine", name]
        command = [sys.executable, "-m", *program, *words]
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)

    def stdout(self) -> str:
        """What it has printed."""
        return (self.folder / "stdout").read_text()

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Wait until stdout or stderr holds a text."""
        deadline = time.monotonic() + seconds
        while text not in self.stdout() + (self.folder / "stderr").read_text():
            assert self.process.poll() is None, (self.folder / "stderr").read_text()
            assert time.monotonic() < deadline, f"{text!r} did not come"
            time.sleep(0.02)

    def end(self, seconds: float = 60) -> Ended:
        """Wait for its end; nothing of it may be left."""
        code = self.process.wait(seconds)
        took = time.monotonic() - self._started
        lines = self.stdout().splitlines()
        stderr = (self.folder / "stderr").read_text()
        assert "Traceback" not in stderr, stderr
        assert leftovers(self.folder) == [], "an orphan"
        return Ended(code, stderr, json.loads(lines[-1]) if lines else {}, took)


def leftovers(folder: Path, seconds: float = 15) -> list[list[str]]:
    """Processes of a command in this folder that are there after some time."""
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def whole(folder: Path) -> None:
    """Every JSON file below the folder can be read, and no writer left a part of one."""
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    assert list(folder.rglob("*.partial")) == []
