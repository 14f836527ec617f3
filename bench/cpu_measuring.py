"""The measuring commands against the real CPU engine, their records kept: what documents quote of them.

    python bench/cpu_measuring.py --json --out bench/results/cpu_measuring.json
    python bench/cpu_measuring.py --steps predict,divergence --out FILE

Steps: `predict` (k = 1 to 4 from k = 5, each measured as well), `measure` (the arms), `divergence` (no
speculation against k = 5), `kernels`. Each runs the command as a person would, in a folder that goes away; a
step that is not asked for keeps what the file has. `--json` prints the final document alone.

Acceptance doesn't depend on what else the machine does. Times do, so the load average stands beside each.
Not covered: any statement about a GPU.
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

TUNE = [sys.executable, "-c", "from tuning.sweep import main; main()"]
PROFILE = ["--profile", "cpu-tiny.yaml"]
STEPS: dict[str, list[list[str]]] = {
    "predict": [
        ["predict", *PROFILE, "--num-speculative-tokens", "1,2,3,4", "--requests", "64", "--check"],
    ],
    "measure": [
        ["measure", *PROFILE, "--requests", "32", "--rates", "2", "--goodput", "ttft:3000,tpot:60"],
    ],
    "divergence": [
        ["divergence", *PROFILE, "--set", "speculative=null", "--out", "none.json"],
        ["divergence", *PROFILE, "--out", "k5.json"],
        ["divergence", "none.json", "k5.json"],
    ],
    "kernels": [["kernels", "--hidden", "4096", "--streams", "4", "--providers", "auto,native"]],
}


def run_step(name: str, folder: Path) -> dict[str, Any]:
    """The record of a step's last command, and what the machine did meanwhile."""
    before, started = os.getloadavg()[0], time.monotonic()
    for command in STEPS[name]:
        done = subprocess.run(
            [*TUNE, *command, "--json"], cwd=folder, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}; stderr says why")
    record = json.loads(done.stdout.splitlines()[-1])
    if name == "measure":  # a list of times per request is for the record on disk
        for arm in record["result"]["arms"]:
            for load in arm.get("loads", []):
                load.pop("tpot_ms_by_request", None)
    return {
        "commands": [" ".join(command) for command in STEPS[name]],
        "seconds": round(time.monotonic() - started),
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "record": record,
    }


def main() -> None:
    """Run the steps, keeping those of the file that are not asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    document = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    for name in arguments.steps.split(","):
        with tempfile.TemporaryDirectory() as folder:
            document[name] = run_step(name, Path(folder))
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document) if arguments.json else f"steps: {', '.join(document)}")


if __name__ == "__main__":
    main()
