"""Where a number comes from: the words that stand beside every measurement."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from dspark_deploy import __version__
from dspark_deploy.preflight import Facts


def describe_machine(facts: Facts) -> dict[str, str]:
    """Engine, processor or GPUs, versions and date. A CPU engine is called one wherever its numbers go."""
    gpus = ", ".join(sorted(set(facts.gpu_names or facts.gpus)))
    return {
        "engine": f"{facts.vllm_distribution} {facts.vllm_version}",
        "hardware": f"{len(facts.gpus)} x {gpus}" if gpus else f"CPU engine: {_processor()}",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items())),
        "python": facts.python,
        "dspark_deploy": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or platform.machine())}, {cores} cores"
