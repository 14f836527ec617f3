"""Time in Triton kernels by kernel, in the interpreter and with our twins, over the ways to speculate.

    python bench/cpu_kernels.py --pair DIR --out bench/results/cpu_kernels.json

Each scenario runs twice, in fresh processes: with `cpu_twins` off, where
`triton.runtime.interpreter.GridExecutor.__call__` is timed, and on, where the launches of twins are as well.
Prints a table of milliseconds a launch; a kernel that is interpreted with twins on is marked, since that is
one without a twin.

Batch 1, one thread. A launch's time includes what its few tensors cost to reach; not covered: penalties,
log probabilities, structured output, whose kernels have no twins and run only when a request asks for them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import cpu_case

SAMPLED = {"temperature": 0.8, "seed": 1}
SCENARIOS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "greedy k=5": {"k": 5},
    "sampled k=5, greedy draft": {"k": 5} | SAMPLED,
    "sampled k=5, probabilistic draft": {"k": 5, "draft": "probabilistic"} | SAMPLED,
    "sampled k=5, block": {"k": 5, "draft": "probabilistic", "rejection": "block"} | SAMPLED,
    "greedy k=5, synthetic": {"k": 5, "rejection": "synthetic"},
}


def measured(pair: str, dtype: str, scenario: dict[str, Any], twins: bool) -> dict[str, Any]:
    """One burst of one scenario: kernels, and the step and tokens that they were part of."""
    case = cpu_case.Case(pair=pair, dtype=dtype, prompts=(3,), kernels=True, twins=twins, **scenario)
    return dict(cpu_case.run(case)["1"])


def per_launch(result: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Kernel -> how it ran, and milliseconds a launch."""
    return {
        row["kernel"]: (row["kind"], 1000 * row["seconds"] / row["calls"])
        for row in result["kernels"]
        if row["calls"]
    }


def table(document: dict[str, Any]) -> str:
    """Markdown: by kernel, the slowest mean launch over the scenarios, interpreted and with twins."""
    before: dict[str, float] = {}
    after: dict[str, tuple[str, float]] = {}
    for runs in document["scenarios"].values():
        for kernel, (_, spent) in per_launch(runs["interpreted"]).items():
            before[kernel] = max(spent, before.get(kernel, 0.0))
        for kernel, (kind, spent) in per_launch(runs["twins"]).items():
            after[kernel] = max((kind, spent), after.get(kernel, (kind, 0.0)), key=lambda cell: cell[1])
    lines = ["| kernel | interpreted, ms | twin, ms | times faster |", "|---|---:|---:|---:|"]
    for kernel in sorted(before, key=before.__getitem__, reverse=True):
        kind, spent = after.get(kernel, ("not launched", float("nan")))
        mark = "" if kind == "twin" else f" ({kind})"
        lines.append(
            f"| `{kernel}` | {before[kernel]:.2f} | {spent:.3f}{mark} | {before[kernel] / spent:.0f} |"
        )
    lines += ["", "| scenario | interpreted: ms a step | with twins: ms a step |", "|---|---:|---:|"]
    lines += [
        f"| {name} | {runs['interpreted']['step_ms']:.1f} | {runs['twins']['step_ms']:.1f} |"
        for name, runs in document["scenarios"].items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Run every scenario with and without twins, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", default=str(cpu_case.SHIPPED_PAIR), help="folder of target and draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true", help="print the document instead of the tables")
    parser.add_argument("--out", type=Path, help="also write the document to this file")
    options = parser.parse_args()
    scenarios = {}
    for name, scenario in SCENARIOS.items():
        scenarios[name] = {
            kind: measured(options.pair, options.dtype, scenario, twins=kind == "twins")
            for kind in ("interpreted", "twins")
        }
        both = [scenarios[name][kind].pop("token_ids") for kind in ("interpreted", "twins")]
        scenarios[name]["same_tokens"] = both[0] == both[1]
        print(f"{name}: done", file=sys.stderr)
    document = {"dtype": options.dtype, "scenarios": scenarios} | cpu_case.machine()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document) if options.json else table(document))


if __name__ == "__main__":
    main()
