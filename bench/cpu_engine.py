"""Step times and tokens/s of the CPU engine: vLLM's V1 runner, the V2 runner with our twins, DSpark by k.

    python bench/cpu_engine.py --pair DIR --json --out bench/results/cpu_engine.json

`DIR` holds `target` and `draft`; without it, the pair that the package ships. Each configuration has a
process of its own; they take turns in random order, a burst of prompts each, so that a machine that slows
down slows all alike. Every number is the median over the rounds, and every ratio the median of the rounds'
ratios. `--json` prints the final document alone.

Greedy decoding in process, one thread. Not covered: sampling (`cpu_kernels.py` has its kernels), HTTP, and
any statement about a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import cpu_case

BATCHES, PROMPTS = (1, 8), (2, 8)


def configurations(pair: str, dtype: str, ks: list[int]) -> dict[str, cpu_case.Case]:
    """The configurations of one round, by name."""
    common = {"pair": pair, "dtype": dtype, "batches": BATCHES, "prompts": PROMPTS}
    named = {
        "v1": cpu_case.Case(runner="v1", **common),
        "v2": cpu_case.Case(**common),
    }
    return named | {f"k={k}": cpu_case.Case(k=k, **common) for k in ks}


Round = dict[str, dict[str, dict[str, Any]]]
"""configuration -> batch -> measure"""


def median(rounds: list[Round], name: str, batch: str, measure: str, over: str | None = None) -> float:
    """The median over the rounds of a measure, or of its ratio to that of the configuration `over`."""
    return round(
        statistics.median(
            one[name][batch][measure] / (one[over][batch][measure] if over else 1.0) for one in rounds
        ),
        3,
    )


def quartiles(runs: list[Round], name: str, batch: str, measure: str, over: str) -> list[float]:
    """How far the rounds' ratios lie apart: the quarter below the first, and the quarter above the last."""
    ratios = [one[name][batch][measure] / one[over][batch][measure] for one in runs]
    low, _, high = statistics.quantiles(ratios, n=4)
    return [round(low, 3), round(high, 3)]


def spread(runs: list[Round], best_k: int) -> dict[str, Any]:
    """Quartiles of the two ratios that have targets."""
    return {
        "v2_over_v1_step_quartiles": {
            str(batch): quartiles(runs, "v2", str(batch), "step_ms", "v1") for batch in BATCHES
        },
        "best_k_speedup_batch1_quartiles": quartiles(runs, f"k={best_k}", "1", "tokens_per_s", "v2"),
    }


def document(rounds: list[Round]) -> dict[str, Any]:
    """The final document. `v2_over_v1_step` (of the worse batch) and `best_k_speedup_batch1` have targets."""
    by_k = [name for name in rounds[0] if name.startswith("k=")]
    batches = [str(batch) for batch in BATCHES]
    measures = ("step_ms", "step_cpu_ms", "tokens_per_s", "acceptance_length")
    steps = {batch: median(rounds, "v2", batch, "step_ms", over="v1") for batch in batches}
    result: dict[str, Any] = {"v2_over_v1_step": max(steps.values()), "v2_over_v1_step_by_batch": steps}
    for batch in batches:
        speedup = {name: median(rounds, name, batch, "tokens_per_s", over="v2") for name in by_k}
        best = max(by_k, key=speedup.__getitem__)
        result[f"best_k_batch{batch}"] = int(best.removeprefix("k="))
        result[f"best_k_speedup_batch{batch}"] = speedup[best]
        result[f"speedup_by_k_batch{batch}"] = speedup
        result[f"step_over_no_speculation_by_k_batch{batch}"] = {
            name: median(rounds, name, batch, "step_ms", over="v2") for name in by_k
        }
        result[f"same_greedy_tokens_batch{batch}"] = {
            name: _agreement(rounds, name, batch) for name in rounds[0] if name != "v2"
        }
    table = {
        name: {batch: {key: median(rounds, name, batch, key) for key in measures} for batch in batches}
        for name in rounds[0]
    }
    runs = [
        {name: {batch: _plain(measured) for batch, measured in run.items()} for name, run in one.items()}
        for one in rounds
    ]
    if len(rounds) > 1:
        result |= spread(rounds, result["best_k_batch1"])
    return result | {"table": table, "rounds": len(rounds), "runs": runs}


def _agreement(rounds: list[Round], name: str, batch: str) -> str:
    pairs = [
        pair
        for one in rounds
        for pair in zip(one["v2"][batch]["token_ids"], one[name][batch]["token_ids"], strict=True)
    ]
    return f"{sum(one == two for one, two in pairs)} of {len(pairs)}"


def _plain(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in measured.items() if key not in ("token_ids", "kernels")}


def show(result: dict[str, Any]) -> str:
    """The document as a table for a person."""
    lines = [f"{result['machine']}, {result['date']}: {result['rounds']} rounds, medians", ""]
    lines.append(f"{'':6}" + "".join(f"  batch {b}: ms/step    tok/s   AL" for b in BATCHES))
    for name, row in result["table"].items():
        cells = "".join(
            f"  {cell['step_ms']:16.2f} {cell['tokens_per_s']:8.1f} {cell['acceptance_length']:4.2f}"
            for cell in row.values()
        )
        lines.append(f"{name:6}{cells}")
    lines += ["", f"V2 step / V1 step: {result['v2_over_v1_step_by_batch']}"]
    for batch in BATCHES:
        best, speedup = result[f"best_k_batch{batch}"], result[f"best_k_speedup_batch{batch}"]
        lines.append(f"batch {batch}: best k = {best}, {speedup} times no speculation")
    return "\n".join(lines)


def main() -> None:
    """Run the rounds and print the document, or a table of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", default=str(cpu_case.SHIPPED_PAIR), help="folder of target and draft")
    parser.add_argument("--dtype", default="float32", help="of the weights, for every configuration")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print the document as JSON")
    parser.add_argument("--out", type=Path, help="also write the document to this file")
    options = parser.parse_args()
    children = {
        name: cpu_case.Child(case)
        for name, case in configurations(options.pair, options.dtype, options.k).items()
    }
    rounds: list[Round] = []
    try:
        for number in range(options.rounds):
            turns = random.Random(number).sample(sorted(children), len(children))
            measured = {name: children[name].burst() for name in turns}
            rounds.append({name: measured[name] for name in children})
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    finally:
        for child in children.values():
            child.close()
    result = document(rounds) | {"dtype": options.dtype} | cpu_case.machine()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if options.json else show(result))


if __name__ == "__main__":
    main()
