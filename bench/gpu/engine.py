"""DSpark on a real GPU: the built-in tiny pair through `dspark-tune sweep`, and which k wins at which load.

    python -m bench.gpu.engine --out bench/results/gpu_engine.json
    python -m bench.gpu.engine --fill-caches --out filled.json -- \
        --set engine.args.gpu-memory-utilization=0.1 --set engine.args.kv-cache-memory-bytes=1073741824

The sweep is the command a person runs, with the profile `cuda-tiny.yaml`: one boot for each configuration,
loads 1, 8 and 64, greedy accuracy on 200 problems, greedy answers compared with those of no speculation. It
goes on where it was stopped, so the benchmark can be run again within the same `--work` folder. Where time is
short, `-- --boots 0` leaves out the finalists' further boots. The report is copied beside the document, and
the sweep's result, from which `dspark-tune report` makes it anew.

A first boot compiles, which on a machine lent by the minute is most of a sweep. `--fill-caches` measures
nothing: it starts `dspark-serve` for every configuration of the profile's space at once and ends each when it
is ready, so that a sweep with the same `--set` finds its kernels on disk. Each engine must fit beside the
others, and with its cache's size given: vLLM takes its neighbours' memory for its own when it profiles.

The machine is named in the document; a number holds for that GPU alone, and a model this small says nothing
about a large one. Not covered: DeepSeek-V4's geometry (`bench.gpu.v4`), adaptive verification, several GPUs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu import start
from dspark_deploy.errors import AccuracyConstraintFailed
from dspark_deploy.profile import load_profile

PROGRAM = "bench.gpu.engine"


def winners(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per load level: the configurations with the lowest TPOT and with the most output tokens/s.

    Among those that are complete and lost no answer; whether accuracy was shown is in each cell.
    """
    good = [cell for cell in cells if cell["state"] == "complete" and not cell["against_reference"]["lost"]]
    if not good:
        return []
    by_load = []
    for index, load in enumerate(good[0]["loads"]):

        def lowest(measure: str, sign: int, index: int = index) -> str:
            best = min(good, key=lambda cell: sign * cell["loads"][index][measure])
            return str(best["configuration"])

        by_load.append(
            {
                "concurrency": load["concurrency"],
                "lowest_tpot": lowest("tpot_ms", 1),
                "most_tokens_per_s": lowest("output_tokens_per_s", -1),
            }
        )
    return by_load


def read(work: Path, out: Path, arguments: list[str]) -> dict[str, Any]:
    """The document of a concluded sweep. A configuration that the machine's time did not reach is named."""
    command = f"python -m bench.gpu.engine --out bench/results/{out.name}"
    result = json.loads((work / "result.json").read_text())
    measured = {cell["num_speculative_tokens"] for cell in result["cells"]}
    asked = result["settings"]["space"]["num_speculative_tokens"]
    return {
        "machine": result["machine"],
        "command": " -- ".join([command, " ".join(arguments)]) if arguments else command,
        "winners": winners(result["cells"]),
        "best": result["best"],
        "not_measured": [k for k in asked if (0 if k == "none" else k) not in measured],
        "cells": result["cells"],
    }


def whole(work: Path) -> dict[str, Any]:
    """The sweep's own result, which `dspark-tune report` renders, without the places of this machine."""
    result = json.loads((work / "result.json").read_text())
    del result["files"], result["search"]["storage"]
    return dict(result)


def fill_caches(profile: str, arguments: list[str], work: Path) -> dict[str, float | str]:
    """Start every k of the space at once: seconds until each was ready, or the last words of one."""
    asked = load_profile(profile).profile.sweep.space.num_speculative_tokens
    changes = {
        str(k): "speculative=null" if k == "none" else f"speculative.num_speculative_tokens={k}"
        for k in asked
    }
    started, found = time.perf_counter(), dict[str, float | str]()
    serve = [sys.executable, "-m", "dspark_deploy.serve", "--profile", profile, "--quiet", "--json"]
    servers = {
        k: subprocess.Popen(
            [*serve, "--set", change, "--set", "engine.port=0", "--run-dir", str(work / k), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        for k, change in changes.items()
    }
    try:
        for k, server in servers.items():
            assert server.stdout is not None
            said = list[str]()
            for line in server.stdout:
                said.append(line)
                if line.startswith("{"):
                    break
            ready = bool(said) and said[-1].startswith("{") and json.loads(said[-1]).get("status") == "ready"
            found[k] = round(time.perf_counter() - started, 1) if ready else "".join(said)[-2000:]
            print(f"k={k}: {found[k]}", flush=True)
    finally:
        for server in servers.values():
            server.send_signal(signal.SIGINT)
        for server in servers.values():
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    return found


def main() -> None:
    """Sweep, pick the winners per load, write the document and the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the document; the report lands beside it")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu-engine"), help="folder of the sweep")
    parser.add_argument("--profile", default="cuda-tiny.yaml")
    parser.add_argument("--fill-caches", action="store_true", help="only start every configuration, at once")
    parser.add_argument("sweep", nargs="*", help="further arguments of dspark-tune sweep, after --")
    options = parser.parse_args()
    start.require(PROGRAM, vllm=False)  # the sweep's preflight says what is missing of vLLM
    if options.fill_caches:
        ready = fill_caches(options.profile, options.sweep, options.work / "filling")
        options.out.write_text(json.dumps(ready, indent=1) + "\n")
        start.conclude(PROGRAM, sum(isinstance(each, str) for each in ready.values()))
        return
    command = ["-m", "tuning.sweep", "sweep", "--profile", options.profile, "--out", str(options.work)]
    code = subprocess.run([sys.executable, *command, *options.sweep], check=False).returncode
    # 7 is a result too: accuracy could not be shown, as with few problems.
    if code not in (0, AccuracyConstraintFailed.exit_code):
        sys.exit(code)
    document = read(options.work, options.out, options.sweep)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    shutil.copy(options.work / "report.html", options.out.with_suffix(".html"))
    options.out.with_suffix(".sweep.json").write_text(json.dumps(whole(options.work), indent=1) + "\n")
    print(json.dumps({"machine": document["machine"], "winners": document["winners"]}, indent=1))


if __name__ == "__main__":
    main()
