"""What the plugin's processes report about kernels: compiles by phase, the warm-up, and who serves mHC."""

from __future__ import annotations

from collections import Counter
from typing import Any


def compile_counts(processes: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Compiles and loads from disk by phase, summed over processes; empty where no process counts any."""
    total: dict[str, Counter[str]] = {}
    for process in processes:
        compiles = process.get("compiles", {})
        for kind in ("compiled", "from_disk"):
            if kind in compiles:
                total.setdefault(kind, Counter()).update(compiles[kind])
    return {kind: dict(counts) for kind, counts in total.items()}


def kernel_lines(processes: list[dict[str, Any]]) -> list[str]:
    """Lines for people; none where nothing was reported, as on the CPU engine."""
    lines = []
    for kind, counts in compile_counts(processes).items():
        shown = ", ".join(f"{phase} {count}" for phase, count in counts.items())
        lines.append(f"kernels {'compiled' if kind == 'compiled' else 'from disk'}: {shown}")
    seen: set[str] = set()
    for process in processes:
        mhc = process.get("mhc")
        if mhc is None:
            continue
        if mhc["skipped"]:
            lines.append(f"warm-up: {mhc['skipped']}")
            continue
        keys = len({key for found in mhc["keys"].values() for key in found})
        lines.append(
            f"warm-up (process {process['pid']}): {keys} TileLang keys, {mhc['compiled']} compiled in "
            f"{mhc['compile_seconds']} s, {len(mhc['token_counts'])} token counts run in "
            f"{mhc['execute_seconds']} s"
        )
        for model, operators in mhc["routes"].items():
            for operator, providers in operators.items():
                line = f"{model} {operator}: {', '.join(sorted(providers))}"
                if line not in seen:  # ranks are alike; one that is not gets a line of its own
                    seen.add(line)
                    lines.append(line)
    return lines
