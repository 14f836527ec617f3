"""What the kernel twins save: `dspark-tune sweep` and the engine tests, with the twins and without.

    python bench/cpu_before_after.py sweep --out bench/results/cpu_before_after_sweep.json
    python bench/cpu_before_after.py tests --out bench/results/cpu_before_after_tests.json

Without twins is how the CPU engine was before there were any: every Triton kernel in the interpreter. The
arms run one after the other: with, without, with. Wall time is what a person waits for; processor time of
the command and everything it started says the same on a machine that other work shares.

CPU engine only. Not covered: installation, which both arms share, and single steps (`cpu_engine.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cpu_case

SWEEP = ["-m", "tuning.sweep", "sweep", "--profile", "cpu-tiny.yaml", "--draft-sample-method", "greedy"]
SWEEP += ["--boots", "0"]
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine"]
WITHOUT = "engine.cpu_twins=false"


def run(what: str, space: str, twins: bool) -> dict[str, float]:
    """Run one arm to its end; wall and processor seconds. Raises CalledProcessError where it fails."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        if what == "sweep":
            command = [*SWEEP, "--num-speculative-tokens", space, "--out", folder]
            command += [] if twins else ["--set", WITHOUT]
        else:
            command = [*TESTS, "--basetemp", f"{folder}/tests"]
            environment |= {} if twins else {"DSPARK_ENGINE_TESTS_SET": WITHOUT}
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([sys.executable, *command], env=environment, stdout=sys.stderr, check=True)
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 1), "cpu_s": round(spent, 1)}


def main() -> None:
    """Run the arms, print and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["sweep", "tests"])
    parser.add_argument("--space", default="none,1,3,5,7", help="--num-speculative-tokens of the sweep")
    parser.add_argument("--out", type=Path, help="also write the document to this file")
    options = parser.parse_args()
    arms: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    for arm in ("with", "without", "with"):
        arms[arm].append(run(options.what, options.space, arm == "with"))
        print(f"{options.what} {arm} twins: {arms[arm][-1]}", file=sys.stderr, flush=True)
    document: dict[str, Any] = {
        "what": options.what,
        **({"space": options.space} if options.what == "sweep" else {}),
        "arms": arms,
    }
    for measure in ("wall_s", "cpu_s"):
        means = {arm: sum(one[measure] for one in runs) / len(runs) for arm, runs in arms.items()}
        document[f"factor_{measure.removesuffix('_s')}"] = round(means["without"] / means["with"], 2)
    document |= {key: value for key, value in cpu_case.machine().items() if key != "omp_num_threads"}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
