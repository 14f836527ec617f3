"""The table of mHC kernels by version, architecture and order of wavefronts. Every number is `emulated`.

    python -m bench.wave64_matrix --out bench/results/wave64_matrix.json

Takes minutes on 2 cores the first time, nearly all of it TileLang's; then seconds, from the cache
folder of the tests. `--hidden 1024,4096` adds sizes; generation gets slower with size.

A case is one launch of one kernel in one order. `time_s` is what that run took on this CPU: what a test
costs, and nothing about a GPU. Not covered: what `docs/wave64.md` says that emulation can't tell.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.simt import cases, emulator, generate, matrix
from tests.simt.emulator import Schedule
from tests.support import sources

ORDERS = {
    "wave 0 first": Schedule(),
    "wave 1 first": Schedule(waves="backward"),
    "wave 1 first, memory 0": Schedule(waves="backward", fill=0),
    "lanes reversed": Schedule(reverse_lanes=True),
    "random": Schedule(waves="random", seed=1),
    "inactive lanes read as 0": Schedule(inactive="zero"),
}


def jobs(hidden: list[int]) -> list[generate.Job]:
    """vLLM's kernels of the old and the new version, and ours."""
    found = []
    for size in hidden:
        found += [matrix.upstream(matrix.WRONG, name, "gfx950", size) for name in cases.UPSTREAM]
        found += [matrix.upstream(matrix.FIXED, name, "gfx950", size) for name in cases.UPSTREAM]
        found += [matrix.upstream(matrix.FIXED, name, "gfx942", size) for name in (*matrix.PRE, "head")]
        found += [matrix.upstream(matrix.WRONG, "pre", "gfx942", size)]
        found += [matrix.upstream(v, "pre_with_norm", "gfx1100", size) for v in (matrix.WRONG, matrix.FIXED)]
        for arch in generate.WAVE:
            found += matrix.ours(arch, size)
    return found


def measured(job: generate.Job) -> list[dict[str, Any]]:
    """One row per token count and order."""
    kernel = emulator.Kernel(job)
    rows = []
    for tokens in matrix.TOKENS:
        for order, schedule in ORDERS.items():
            case = cases.case(job.kernel, job.hidden, tokens, job.params)
            started = time.perf_counter()
            report = kernel.run(case, generate.WAVE[job.arch], schedule)
            spent = time.perf_counter() - started
            errors = cases.errors(case)
            worst = max(errors, key=lambda name: (errors[name].nans > 0, errors[name].nrmse))
            rows.append(
                {
                    "origin": job.origin,
                    "kernel": job.kernel,
                    "arch": job.arch,
                    "wave": generate.WAVE[job.arch],
                    "hidden": job.hidden,
                    "params": job.params,
                    "tokens": tokens,
                    "order": order,
                    "right": all(error.right for error in errors.values()),
                    "worst_output": worst,
                    **{
                        name: None if value != value else value
                        for name, value in asdict(errors[worst]).items()
                    },
                    "faults": report.faults(),
                    "wave_synchronous": report.wave_synchronous,
                    "time_s": round(spent, 4),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: per kernel, version and architecture, in how many runs it was right, and what was seen."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["origin"], row["arch"]].append(row)
    lines = ["| kernel | of | arch | right runs | ratio | most NRMSE | faults | ms a run |", "|---" * 8 + "|"]
    for (kernel, origin, arch), found in sorted(groups.items()):
        right = sum(row["right"] for row in found)
        numbers = [row for row in found if row["ratio"] is not None]
        ratios = [row["ratio"] for row in numbers] or [float("nan")]
        faults = ", ".join(sorted({name for row in found for name in row["faults"]})) or "none"
        cells = [
            *(kernel, origin, arch, f"{right}/{len(found)}"),
            f"{min(ratios):.4f} to {max(ratios):.4f}",
            f"{max((row['nrmse'] for row in numbers), default=float('nan')):.1e}",
            faults,
            f"{1000 * sum(row['time_s'] for row in found) / len(found):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Generate, run, print the table and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", default="1024", help="comma-separated hidden sizes")
    arguments = parser.parse_args()
    wanted = jobs([int(size) for size in arguments.hidden.split(",")])
    generate.sources_of(wanted)
    rows = [row for job in wanted for row in measured(job)]
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True)
    document = {
        "label": "emulated",
        "command": f"python -m bench.wave64_matrix --out {arguments.out} --hidden {arguments.hidden}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": platform.machine(), "system": platform.system()},
        "versions": {
            "tilelang": sources.TILELANG[0].partition("==")[2],
            "vllm": [matrix.WRONG, matrix.FIXED],
            "g++": compiler.stdout.strip(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
