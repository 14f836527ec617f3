"""Fills the kernel caches on disk for a profile, ahead of a rollout: a start up to readiness, then a stop.

    dspark-serve --profile mi355x.yaml --prewarm

The engine that will serve is the one that knows what it compiles, so it is started as for serving: its
workers load the model, warm every mHC kernel and capture their graphs. Then it is stopped, and what was
compiled and what the caches grew by is reported. Give the caches a folder that outlives the container,
through TILELANG_CACHE_DIR, TRITON_CACHE_DIR and AITER_JIT_DIR in `engine.env`; one that can't be written is
refused before the start.

On ROCm a start of which nothing was counted, or that warmed no key, is a failure. On CUDA nothing of ours
warms or counts, and the result says so without a number. The CPU engine compiles no kernel.

Not covered: caches of torch.compile; whether the next start takes up what was written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark_deploy.console import engine_log, print_json
from dspark_deploy.errors import InputError, MeasurementError
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
NOT_COUNTED = "compiles are not counted on this platform"


def cache_bytes(env: Mapping[str, str]) -> dict[str, int]:
    """Bytes of each cache on disk, as an engine with this environment would find it."""
    folders = cache_folders(env)
    return {
        name: sum(path.stat().st_size for path in folders[variable].expanduser().rglob("*") if path.is_file())
        for name, variable in CACHES.items()
    }


def cache_faults(loaded: LoadedProfile, env: Mapping[str, str]) -> list[str]:
    """What keeps each cache from being written, one line per variable. Creates nothing that stays."""
    folders = cache_folders(env)
    faults = []
    for variable in CACHES.values():
        folder = folders[variable].expanduser().absolute()
        try:
            existing = next(place for place in (folder, *folder.parents) if place.exists())
            reason = "" if existing.is_dir() else f"{existing} is no folder"
            if not reason:
                # Permissions alone don't tell: root has them all, on a read-only file system too.
                with tempfile.TemporaryFile(dir=existing):
                    pass
        except OSError as error:
            reason = f"it can't be written: {error.strerror}"
        if reason:
            place = loaded.where("engine", "env", variable)
            faults.append(
                f"{place}: {variable} is {folder}, and {reason}; name a folder that this user can write"
            )
    return faults


def run_prewarm(
    console: Console,
    loaded: LoadedProfile,
    facts: Facts,
    extra: list[str],
    run_dir: Path,
    quiet: bool,
    as_json: bool,
) -> None:
    """Start, wait for readiness, report, stop.

    Raises EngineStartError; InputError for `jit.guard: off` and caches that can't be written, before the
    start; MeasurementError where nothing was counted or warmed on ROCm, after `prewarm.json` was written.
    """
    profile = loaded.profile
    if profile.hardware.platform == "cpu":
        console.print(NOTHING)
        if as_json:
            print_json({"status": "nothing to warm", "reason": NOTHING})
        return
    if profile.hardware.platform == "rocm" and profile.jit.guard == "off":
        raise InputError(
            "--prewarm counts compiles, and jit.guard: off counts none; use --set jit.guard=warn"
        )
    # Only the path of the settings depends on the run, and no cache on that.
    faults = cache_faults(loaded, rendering.engine_environment(profile, Path(), os.environ))
    if faults:
        raise InputError(faults)
    run = new_run_directory(run_dir, profile.name)
    console.print(f"run directory: {run.path}", markup=False)
    env = rendering.engine_environment(profile, run.settings.resolve(), os.environ)
    before = cache_bytes(env)
    with Engine.start(loaded, facts, run, extra) as engine:
        report = engine.wait_ready(engine_log(quiet))
    after = cache_bytes(env)
    document = prewarm_document(profile.hardware.platform, report.processes, report.seconds, before, after)
    run.write_json("prewarm.json", document)
    for line in kernel_lines(report.processes):
        console.print(line, markup=False)
    for name, grown in document["bytes"].items():
        console.print(f"{name} cache: {after[name]} bytes, {grown} more than before", markup=False)
    if document["status"] == "failed":
        raise MeasurementError(
            f"prewarmed nothing that could be shown: {document['reason']}. {run.path}/prewarm.json has what "
            f"was seen"
        )
    if "reason" in document:
        console.print(document["reason"], markup=False)
    console.print(f"ready after {report.seconds:.1f} s, and stopped", markup=False)
    if as_json:
        print_json({"run_directory": str(run.path), **document})


def prewarm_document(
    platform: str,
    processes: list[dict[str, Any]],
    seconds: float,
    before: dict[str, int],
    after: dict[str, int],
) -> dict[str, Any]:
    """What a start did for the caches: seconds, bytes, and on ROCm what the processes counted.

    `status` is `prewarmed`, with keys and how many kernels were compiled: 0 where the caches were full
    already. Or `failed` with `reason`, or on CUDA `not counted` with `reason`; both without keys and counts.
    """
    seen = {
        "seconds": round(seconds, 2),
        "bytes": {name: after[name] - before[name] for name in after},
    }
    if platform == "cuda":
        return {"status": "not counted", "reason": NOT_COUNTED, **seen}
    reason = _nothing_shown(processes)
    if reason:
        return {"status": "failed", "reason": reason, **seen}
    counts = compile_counts(processes)
    return {
        "status": "prewarmed",
        "keys": _keys(processes),
        **seen,
        "compiles": counts,
        "compiled": sum(counts["compiled"].values()),
    }


def _keys(processes: list[dict[str, Any]]) -> list[str]:
    """The TileLang keys that the warm-up of any process found."""
    found = (process.get("mhc", {}).get("keys", {}).values() for process in processes)
    return sorted({key for models in found for keys in models for key in keys})


def _nothing_shown(processes: list[dict[str, Any]]) -> str:
    """Why these reports of a start on ROCm show no warm-up, and what to do; empty where they show one."""
    # The numerics gate and the warm-up report from workers alone.
    workers = [process for process in processes if {"mhc", "numerics"} & process.keys()]
    for section, what in (("compiles", "its compiles"), ("mhc", "a warm-up")):
        silent = [str(process["pid"]) for process in workers if section not in process]
        if silent or not any(section in process for process in processes):
            who = f"process {', '.join(silent)}" if silent else "no process"
            verb = "did not report" if silent else "reported"
            return (
                f"{who} {verb} {what}, so the plugin's patches for ROCm were not installed there; look "
                f"at `patches` in processes/ of the run directory, and at VLLM_PLUGINS"
            )
    skipped = sorted({process["mhc"]["skipped"] for process in workers if process["mhc"]["skipped"]})
    if skipped:
        return f"the warm-up was skipped: {'; '.join(skipped)}"
    if _keys(processes):
        return ""
    routes = [operators for process in workers for operators in process["mhc"]["routes"].values()]
    providers = {name for operators in routes for used in operators.values() for name in used}
    counted = sum(sum(counts.values()) for counts in compile_counts(processes).values())
    # Where AITER or torch serves every operator, as on gfx942, nothing is asked of TileLang, rightly.
    if providers and "tilelang" not in providers and counted:
        return ""
    return (
        f"zero keys were found, and {counted} kernels compiled or loaded; operators are served by "
        f"{', '.join(sorted(providers)) or 'nothing'}. Report this with the run directory"
    )
