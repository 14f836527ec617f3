"""One worker of a sweep on a stand-in engine of fixed cost, as a process of its own.

    python -m tests.support.worker FOLDER STORAGE COST_S

It loads everything, makes FOLDER/ready, waits for FOLDER/../go, sweeps, and prints the time that took in
seconds, what it launched and the result's cells, as one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

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


class Noting(StandIn):
    """Writes down each launch as it begins, so that those of a killed worker are known."""

    notes: Path

    def __call__(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        with self.notes.open("a") as handle:
            handle.write(f"{args[4].name}\n")  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)  # type: ignore[arg-type]


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
