"""What a predicted search costs against the whole grid, and what it loses: both on the CPU engine.

    python bench/search_cost.py --json --out bench/results/search_cost.json
    python bench/search_cost.py --folder KEPT --out FILE          go on where it stopped

The grid measures every configuration of the space; the predicted search boots a run at the largest k, two
synthetic ones, and what they leave. Each is the command as a person would run it. The answer of both is
looked up in the grid's own numbers, so that the difference is of configurations and not of boots.

Bounds, and exit code 1 beyond them: the optimum within 2 % of the grid's, at 40 % of its cost at most. Cost
is the seconds of all engines, from start to end. Not covered: finalists, which both would boot alike, and
any statement about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPACE = ["--num-speculative-tokens", "none,1,2,3,4,5,6,7", "--draft-sample-method", "greedy,probabilistic"]
SWEEP = [sys.executable, "-c", "from tuning.sweep import main; main()", "sweep", "--profile", "cpu-tiny.yaml"]
SIZE = ["--prompts-per-load", "24", "--accuracy-problems", "60", "--accuracy-margin", "0.08"]
COMMON = [*SPACE, *SIZE, "--boots", "0", "--loads", "1,8", "--goal", "latency", "--no-report", "--json"]
MOST_LOST, MOST_COST = 0.02, 0.40


def run(folder: Path, name: str, *flags: str) -> dict[str, Any]:
    """One sweep; it resumes if the folder has a part of it."""
    before, started = os.getloadavg()[0], time.monotonic()
    command = [*SWEEP, *COMMON, "--out", name, *flags]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 7):
        sys.exit(f"the sweep ended with {done.returncode}; stderr says why")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["wall_s"] = round(time.monotonic() - started)
    result["load_average"] = [round(before, 2), round(os.getloadavg()[0], 2)]
    return result


def tpot(result: dict[str, Any], label: str) -> float:
    """TPOT at the lightest load, milliseconds."""
    cell = next(cell for cell in result["cells"] if cell["configuration"] == label)
    return min((load["concurrency"], load["tpot_ms"]) for load in cell["loads"])[1]


def compare(grid: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """Cost and loss of the predicted search."""
    seconds = {
        name: sum(result["search"]["seconds"][part] for part in ("search", "predictions"))
        for name, result in (("grid", grid), ("predicted", predicted))
    }
    accurate = [c["configuration"] for c in grid["cells"] if c["state"] == "complete" and c["accurate"]]
    optimum = min(accurate, key=lambda label: tpot(grid, label))
    measured = [c["configuration"] for c in predicted["cells"] if c["state"] == "complete" and c["accurate"]]
    fastest = min(measured, key=lambda label: tpot(predicted, label))
    found = {
        "machine": grid["machine"],
        "origin": "CPU engine, not a GPU number",
        "configurations": {"grid": len(grid["cells"]), "predicted": len(predicted["cells"])},
        "seconds": seconds,
        "cost": seconds["predicted"] / seconds["grid"],
        "optimum": {"grid": optimum, "predicted": fastest},
        "answer": {"grid": grid["best"], "predicted": predicted["best"]},
        "tpot_ms_in_the_grid": {"grid": tpot(grid, optimum), "predicted": tpot(grid, fastest)},
        "lost": tpot(grid, fastest) / tpot(grid, optimum) - 1,
        "pruned": predicted["search"]["pruned"],
        "grid_tpot_ms": {label: tpot(grid, label) for label in accurate},
        "load_average": {"grid": grid["load_average"], "predicted": predicted["load_average"]},
    }
    found["within_bounds"] = found["lost"] <= MOST_LOST and found["cost"] <= MOST_COST
    return found


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        predicted = run(folder, "predicted", "--search", "predicted")
        found = compare(run(folder, "grid"), predicted)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found) if arguments.json else f"lost {found['lost']:.1%}, cost {found['cost']:.0%}")
    sys.exit(0 if found["within_bounds"] else 1)


if __name__ == "__main__":
    main()
