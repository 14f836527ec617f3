"""One vLLM process: which patches belong to which phase of its start, and the report it leaves.

The report `<report_dir>/<pid>.json` is rewritten after each phase, so that a process that dies between
two phases still says how far it came.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_deploy.plugin.registry import Patch, Registry
from dspark_deploy.plugin.settings import Settings

_registry = Registry()
_milliseconds: dict[str, float] = {}
_sections: dict[str, Callable[[], Any]] = {}


def run_phase(phase: str) -> None:
    """Apply the patches of `phase` (`platform` or `general`) and report. Safe to call again."""
    started = time.thread_time()
    settings = Settings.from_environment()
    patches = PHASES[phase](settings)
    try:
        _registry.apply(patches)
    finally:
        spent = (time.thread_time() - started) * 1000
        _milliseconds[phase] = round(_milliseconds.get(phase, 0.0) + spent, 3)
        write_report(settings.report_dir)


def apply_late(patches: list[Patch]) -> None:
    """Apply patches whose targets are loaded only after both hooks, and bring the report up to date."""
    started = time.thread_time()
    try:
        _registry.apply(patches)
    finally:
        spent = (time.thread_time() - started) * 1000
        _milliseconds["late"] = round(_milliseconds.get("late", 0.0) + spent, 3)
        write_report(Settings.from_environment().report_dir)


def add_section(name: str, content: Callable[[], Any]) -> None:
    """Add a part to this process's report; `content` is asked each time the report is written."""
    _sections[name] = content


def write_report(report_dir: Path) -> None:
    """Write this process's report, atomically."""
    report_dir.mkdir(parents=True, exist_ok=True)
    document = {
        "pid": os.getpid(),
        "process": multiprocessing.current_process().name,
        "python": sys.version.split()[0],
        "milliseconds": _milliseconds,
        "patches": [record.as_json() for record in _registry.records],
        **{name: content() for name, content in _sections.items()},
    }
    path = report_dir / f"{os.getpid()}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1))
    partial.replace(path)


def _platform_patches(settings: Settings) -> list[Patch]:
    if settings.platform != "cpu":
        return []
    from dspark_deploy.plugin.cpu_engine import triton_interpreter

    return triton_interpreter.patches()


def _general_patches(settings: Settings) -> list[Patch]:
    from dspark_deploy.plugin import gate, graph_breaks, resolved

    write = functools.partial(write_report, settings.report_dir)
    everywhere = [
        gate.hook(settings.mhc_gate, apply_late, add_section, write),
        resolved.hook(apply_late, add_section, write),
    ]
    if settings.platform != "cpu":
        everywhere.append(graph_breaks.hook(apply_late))
    if settings.platform == "rocm":
        from dspark_deploy.plugin.amd import modules

        return [*everywhere, modules.hook(settings, apply_late, add_section, write)]
    if settings.platform != "cpu":
        return everywhere
    from dspark_deploy.plugin.cpu_engine import triton_interpreter, worker
    from dspark_deploy.plugin.cpu_engine.deepseek_v4 import patches as deepseek_v4

    return [
        *everywhere,
        *triton_interpreter.checks(),
        worker.hook(settings.cpu_twins, apply_late),
        deepseek_v4.hook(settings.mhc_provider, apply_late),
    ]


PHASES: dict[str, Callable[[Settings], list[Patch]]] = {
    "platform": _platform_patches,
    "general": _general_patches,
}
