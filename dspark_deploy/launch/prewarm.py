"""Fills the kernel caches on disk for a profile, ahead of a rollout: a start up to readiness, then a stop.

    dspark-serve --profile mi355x.yaml --prewarm

The engine that will serve is the one that knows what it compiles, so it is started as for serving: its
workers load the model, warm every mHC kernel and capture their graphs. Then it is stopped, and what was
compiled and what the caches grew by is reported. Give the caches a folder that outlives the container,
through TILELANG_CACHE_DIR, TRITON_CACHE_DIR and AITER_JIT_DIR in `engine.env`.

Not covered: caches of torch.compile. The CPU engine compiles no kernel, so there is nothing to warm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark_deploy.console import engine_log, print_json
from dspark_deploy.errors import InputError
from dspark_deploy.launch import command as rendering
from dspark_deploy.launch.engine import Engine
from dspark_deploy.launch.kernels import compile_counts, kernel_lines
from dspark_deploy.launch.rundir import new_run_directory
from dspark_deploy.preflight import Facts
from dspark_deploy.preflight.caches import cache_folders
from dspark_deploy.profile import LoadedProfile

# Caches of kernels, by the variable that moves them; vLLM's own holds torch.compile's graphs instead.
CACHES = {"tilelang": "TILELANG_CACHE_DIR", "triton": "TRITON_CACHE_DIR", "aiter": "AITER_JIT_DIR"}
NOTHING = "nothing to warm: the CPU engine interprets or replaces its kernels, and compiles none"


def cache_bytes(env: Mapping[str, str]) -> dict[str, int]:
    """Bytes of each cache on disk, as an engine with this environment would find it."""
    folders = cache_folders(env)
    return {
        name: sum(path.stat().st_size for path in folders[variable].expanduser().rglob("*") if path.is_file())
        for name, variable in CACHES.items()
    }


def run_prewarm(
    console: Console,
    loaded: LoadedProfile,
    facts: Facts,
    extra: list[str],
    run_dir: Path,
    quiet: bool,
    as_json: bool,
) -> None:
    """Start, wait for readiness, report, stop. Raises EngineStartError; InputError for `jit.guard: off`."""
    profile = loaded.profile
    if profile.hardware.platform == "cpu":
        console.print(NOTHING)
        if as_json:
            print_json({"status": "nothing to warm", "reason": NOTHING})
        return
    if profile.jit.guard == "off":
        raise InputError(
            "--prewarm counts compiles, and jit.guard: off counts none; use --set jit.guard=warn"
        )
    run = new_run_directory(run_dir, profile.name)
    console.print(f"run directory: {run.path}", markup=False)
    env = rendering.engine_environment(profile, run.settings.resolve(), os.environ)
    before = cache_bytes(env)
    with Engine.start(loaded, facts, run, extra) as engine:
        report = engine.wait_ready(engine_log(quiet))
    after = cache_bytes(env)
    document = prewarm_document(report.processes, report.seconds, before, after)
    run.write_json("prewarm.json", document)
    for line in kernel_lines(report.processes):
        console.print(line, markup=False)
    for name, grown in document["bytes"].items():
        console.print(f"{name} cache: {after[name]} bytes, {grown} more than before", markup=False)
    console.print(f"ready after {report.seconds:.1f} s, and stopped", markup=False)
    if as_json:
        print_json({"run_directory": str(run.path), **document})


def prewarm_document(
    processes: list[dict[str, Any]], seconds: float, before: dict[str, int], after: dict[str, int]
) -> dict[str, Any]:
    """Keys, seconds, bytes, and how many kernels were compiled: 0 where the caches were full already."""
    counts = compile_counts(processes)
    keys = sorted(
        {
            key
            for process in processes
            for found in process.get("mhc", {}).get("keys", {}).values()
            for key in found
        }
    )
    return {
        "status": "prewarmed",
        "keys": keys,
        "seconds": round(seconds, 2),
        "bytes": {name: after[name] - before[name] for name in after},
        "compiles": counts,
        "compiled": sum(counts.get("compiled", {}).values()),
    }
