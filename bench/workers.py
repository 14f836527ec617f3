"""How much sooner two workers finish a grid than one, on an engine of fixed cost.

    python -m bench.workers --json --out bench/results/workers.json
    python -m bench.workers --kinds journal --cost 0.5 --rounds 1

Each worker is a process that sweeps the 13 configurations of `tests.support.worker`, on a stand-in engine
that sleeps for `--cost` seconds and gives made-up numbers. Time runs from the moment that all of them have
loaded their modules to the end of the last one's sweep. 7 of 13 is the least that two can need; what comes on
top is the storage's and the waiting for one another. Exit code 1 where two need more than 0.6 of one's time.

Not covered: engines, whose costs differ between configurations, workers on several hosts, and a network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna

from bench.storages import KINDS, storage
from tests.support.worker import CELLS, workers

MOST = 0.6


def seconds(kind: str, number: int, cost_s: float) -> float:
    """The time in which so many workers finish the grid on an empty storage."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        storage(kind, Path(temporary)) as url,
        workers(Path(temporary) / "workers", url, number, cost_s) as found,
    ):
        return max(float(each.end()["seconds"]) for each in found)


def main() -> None:
    """Measure every kind, one worker and two taking turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--cost", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for turn in range(1, arguments.rounds + 1):
        for kind in arguments.kinds.split(","):
            one, two = (round(seconds(kind, number, arguments.cost), 2) for number in (1, 2))
            share = round(two / one, 3)
            rows.append({"storage": kind, "round": turn, "one_s": one, "two_s": two, "share": share})
            print(rows[-1], file=sys.stderr)
    worst = max(row["share"] for row in rows)
    document = {
        "origin": "stand-in engine of fixed cost, which sleeps",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "optuna": optuna.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "configurations": CELLS,
        "engine_cost_s": arguments.cost,
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "rows": rows,
        "worst_share": worst,
        "within_bounds": worst <= MOST,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document) if arguments.json else f"two workers need {worst:.2f} of one's time at most")
    sys.exit(0 if document["within_bounds"] else 1)


if __name__ == "__main__":
    main()
