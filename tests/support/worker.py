"""One worker of a sweep on a stand-in engine of fixed cost, as a process of its own; and several at once.

    python -m tests.support.worker FOLDER STORAGE COST_S
    with workers(folder, storage, number=2) as found: results = [each.end() for each in found]

The process loads everything, makes FOLDER/ready, waits for FOLDER/../go, sweeps, and prints the time that
took in seconds, what it launched and the result's cells, as one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.support.stand_in import StandIn
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load
from tuning.campaign import Campaign
from tuning.conclusion import conclude
from tuning.opening import Options

SPACE = (
    TEXT
    + """\
sweep:
  space:
    num_speculative_tokens: [none, 1, 2, 3, 4, 5, 6]
    draft_sample_method: [greedy, probabilistic]
  loads: [1, 8]
  boots: 0
"""
)
CELLS = 13  # of that space
COST_S = 0.4


class Noting(StandIn):
    """Writes down each launch as it begins, so that those of a killed worker are known."""

    notes: Path

    def __call__(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        with self.notes.open("a") as handle:
            handle.write(f"{args[4].name}\n")  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)  # type: ignore[arg-type]


class Worker:
    """A worker's process and its folder, as whoever starts it sees it."""

    def __init__(self, folder: Path, storage: str, cost_s: float) -> None:
        folder.mkdir()
        self.folder = folder
        command = [sys.executable, "-m", "tests.support.worker", str(folder), storage, str(cost_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def launched(self) -> list[str]:
        file = self.folder / "launched"
        return file.read_text().split() if file.exists() else []

    def end(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, err
        self.stderr = err
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


@contextmanager
def workers(folder: Path, storage: str, number: int, cost_s: float = COST_S) -> Iterator[list[Worker]]:
    """Workers that begin at one moment."""
    folder.mkdir()
    found = [Worker(folder / f"w{i}", storage, cost_s) for i in range(number)]
    try:
        deadline = time.monotonic() + 60
        while not all((each.folder / "ready").exists() for each in found):
            assert time.monotonic() < deadline, "the workers did not come up"
            assert all(each.process.poll() is None for each in found), found[0].process.communicate()[1]
            time.sleep(0.05)
        (folder / "go").touch()
        yield found
    finally:
        for each in found:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait()


def main() -> None:
    """Wait for the start, then sweep."""
    folder, storage, cost = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    engine = Noting(cost_s=cost)
    engine.notes = folder / "launched"
    loaded = load(folder, SPACE)
    (folder / "ready").touch()
    while not (folder.parent / "go").exists():
        time.sleep(0.01)
    started = time.monotonic()
    console = Console(file=(folder / "console").open("w"), width=140)
    campaign = Campaign(loaded, good_facts(), folder, Options(storage), console, engine)
    campaign.run()
    seconds = time.monotonic() - started
    result = conclude(campaign, report=False)
    cells = [(cell["configuration"], cell["state"]) for cell in result["cells"]]
    print(json.dumps({"seconds": seconds, "launched": engine.launched, "cells": cells}))


if __name__ == "__main__":
    main()
