"""AMD warm-up, SIMULATED: patch states and key counts by vLLM version; lowering, serial and parallel.

    python -m bench.amd_warmup --out bench/results/amd_warmup.json --full 0.33.0

No part of this runs on an AMD GPU. Workers are those of `tests/warmup`: vLLM's ROCm code on a CPU, with
real model classes, dispatch and TileLang. The seconds are TileLang's real elaboration and lowering to HIP
source with the device compiler stubbed out, so they leave out hipcc, which on a GPU machine is most of the
time.

Prints one row per version, family and providers. Needs what `pytest tests/warmup` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from tests.warmup.conftest import DEFAULT, REST, simulate_worker

PROVIDERS = (("gfx950", False), ("gfx950", True), ("gfx942", True))
# One token count for every key of DeepSeek-V4.1's draft, and of V4's.
COUNTS = [1, 20, 40, 200, 1100]


def rows(versions: list[str], hidden: list[int], full: list[str]) -> list[dict[str, Any]]:
    """One row per version, family, architecture, providers and hidden size; `full` at every token count."""
    found = []
    for version in versions:
        for arch, aiter in PROVIDERS:
            seen = simulate_worker(
                version,
                arch=arch,
                case="closure",
                aiter=aiter,
                hidden=hidden,
                every_up_to=8192 if version in full else 64,
                runner=not aiter,
            )
            for name, each in seen["families"].items():
                family, size = name.split()
                draft = set(each["asked"]["draft"])
                found.append(
                    {
                        "vllm": version,
                        "family": family,
                        "hidden": int(size),
                        "arch": arch,
                        "aiter": aiter,
                        "fused_post": seen["patches"][f"fused-post:{family}"]["state"],
                        "keys_warmed": len(each["warmed"]),
                        "keys_of_the_draft_alone": len(draft - set(each["asked"]["target"])),
                        "compiles_while_serving": len(each["serving_compiles"]),
                        "token_counts_warmed": len(each["token_counts"]),
                        "token_counts_swept": each["swept"],
                        "plugin_ms": round(sum(seen["milliseconds"].values()), 1),
                    }
                )
                print(json.dumps(found[-1]), flush=True)
    return found


def lowering(version: str, family: str, hidden: int, workers: int) -> dict[str, Any]:
    """Seconds to build and lower every key of the draft, with the device compiler stubbed."""
    seen = simulate_worker(
        version, case="lowering", family=family, hidden=hidden, kernels="all", counts=COUNTS, workers=workers
    )
    row = {
        "vllm": version,
        "family": family,
        "hidden": hidden,
        "workers": workers,
        "keys": seen["compiled"],
        "seconds": seen["seconds"],
        "device_compiler": "stubbed",
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Run everything and write the file that documents quote."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--versions", nargs="+", default=[*REST, *DEFAULT])
    parser.add_argument("--hidden", nargs="+", type=int, default=[4096, 5120, 7168])
    parser.add_argument("--full", nargs="*", default=[], help="versions swept at every token count to 8192")
    parser.add_argument("--lowering", nargs="*", default=["deepseek_v4", "deepseek_v41"])
    arguments = parser.parse_args()
    threads = os.cpu_count() or 1
    document: dict[str, Any] = {
        "simulated": "no AMD GPU: vLLM's ROCm code on a CPU, AITER's operators and hipcc stubbed",
        "command": "python -m bench.amd_warmup " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {threads} CPU cores, Python {platform.python_version()}",
        "load_average_at_start": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
        "tilelang": "0.1.12",
        "rows": rows(arguments.versions, arguments.hidden, arguments.full),
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    document["load_average_at_lowering"] = round(os.getloadavg()[0], 1)
    document["lowering"] = [
        lowering(DEFAULT[-1], family, 5120, workers)
        for family in arguments.lowering
        for workers in dict.fromkeys((1, threads))
    ]
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
