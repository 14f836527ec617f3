"""What a sweep's operations cost on each storage, by the number of trials that are in it already.

    python -m bench.storages --json --out bench/results/storages.json
    python -m bench.storages --kinds journal,sqlite --sizes 0,1000

Operations are the sweep's own: `open` (a new worker reads the study), `claim` (bury the dead, look what is
owed, get a trial), `beat` (a sign of life), `complete` (a measurement of four loads and 200 answers). No
engine is booted; measurements are made up, of the size of real ones. PostgreSQL is a server of its own on
this machine without fsync, so that its disk is left out; the network is left out as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from tests.support.grpc_proxy import grpc_proxy
from tests.support.postgres import postgres
from tests.unit.measurements import answers, measurement
from tuning.answers import pack
from tuning.space import Configuration, Space
from tuning.storage import open_storage
from tuning.study import Study
from tuning.trials import open_study

KINDS = ("sqlite", "journal", "postgresql", "grpc over postgresql")
REPEATS = 5
MEASURED = measurement({load: [3.0 + 0.01 * i for i in range(64)] for load in (1, 8, 32, 128)}, 5)
ANSWERS = answers(180, 200)


@contextmanager
def storage(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a storage of this kind, empty."""
    if kind in ("sqlite", "journal"):
        yield f"{kind}:///{folder}/study"
    else:
        with postgres() as url:
            if kind == "postgresql":
                yield url
            else:
                with grpc_proxy(url) as proxied:
                    yield proxied


def space(size: int) -> Space:
    """A space of `size` points and more."""
    seqs = list(range(1, size // 8 + 2))
    cells = [Configuration(0)]
    cells += [Configuration(k, "greedy", (("max_num_seqs", n),)) for n in seqs for k in range(1, 9)]
    values = {
        "num_speculative_tokens": list(range(9)),
        "draft_sample_method": ["greedy"],
        "max_num_seqs": seqs,
    }
    return Space(cells, {name: list(each) for name, each in values.items()})


def fill(study: optuna.Study, whole: Space, have: int, wanted: int) -> None:
    """Add complete trials, as seeding does."""
    attributes = {"measurement": json.dumps(MEASURED.as_json()), "answers": pack(ANSWERS)}
    for cell in whole.cells[have:wanted]:
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE,
                values=[3.0, 100.0],
                user_attrs={**attributes, "configuration": cell.params(), "worker": "elsewhere/0/0:1:1.0"},
                constraints={"accuracy": -0.01},
            )
        )


def measure(kind: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Milliseconds of each operation at each size, medians of `REPEATS`."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, storage(kind, Path(folder)) as url:
        whole = space(max(sizes) + 100)
        have = 0
        for size in sizes:
            fill(open_study(open_storage(url), "bench", {}, "grid"), whole, have, size)
            have = max(have, size)
            times: dict[str, list[float]] = {"open": [], "claim": [], "beat": [], "complete": []}
            started = time.perf_counter()
            study = Study(open_study(open_storage(url), "bench", {}, "grid"), whole, f"bench/{size}/0:1:1.0")
            times["open"].append(time.perf_counter() - started)
            for _ in range(REPEATS):
                started = time.perf_counter()
                claimed = study.claim()
                times["claim"].append(time.perf_counter() - started)
                assert claimed is not None
                started = time.perf_counter()
                study.beat(claimed[1], 1)
                times["beat"].append(time.perf_counter() - started)
                started = time.perf_counter()
                study.complete(claimed[1], MEASURED, ANSWERS, -0.01)
                times["complete"].append(time.perf_counter() - started)
            have += REPEATS
            found = {name: round(statistics.median(each) * 1000, 2) for name, each in times.items()}
            rows.append({"storage": kind, "trials": size, "ms": found})
            print(f"{kind:22} {size:6} {found}", file=sys.stderr)
    return rows


def main() -> None:
    """Measure every kind."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default="0,300,1000,3000")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    before = os.getloadavg()[0]
    rows = [row for kind in arguments.kinds.split(",") for row in measure(kind, sizes)]
    document = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "optuna": optuna.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "bytes_a_trial": len(json.dumps(MEASURED.as_json())) + len(pack(ANSWERS)),
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document) if arguments.json else f"{len(rows)} rows")


if __name__ == "__main__":
    main()
