"""Does speculation change what a temperature yields? The whole CPU engine, asked often for the same text.

    python bench/cpu_sampling.py --pair DIR --out bench/results/cpu_sampling.json

One prompt is continued thousands of times without speculation and with each way to draft and to verify,
with seeds of its own for every continuation. The first tokens of the continuations are compared by
chi-squared tests: two engines without speculation, which shows what chance does, and each speculating
engine against the pooled two. `synthetic` acceptance, whose output vLLM doesn't promise, must fail.

Exits with 1 where a test says otherwise than it should. Not covered: prompts of other lengths and mixed
batches, which `tests/twins/test_twins_unbiased.py` has at the level of vLLM's samplers.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

import cpu_case
import numpy as np
from scipy import stats

PREFIX, BIASED = 5, 1e-4
PLAIN: dict[str, dict[str, Any]] = {"none": {}, "none again": {}}
LOSSLESS: dict[str, dict[str, Any]] = {
    "greedy draft, standard": {"k": 4},
    "greedy draft, block": {"k": 4, "rejection": "block"},
    "probabilistic draft, standard": {"k": 4, "draft": "probabilistic"},
    "probabilistic draft, block": {"k": 4, "draft": "probabilistic", "rejection": "block"},
}
LOSSY: dict[str, dict[str, Any]] = {"synthetic": {"k": 4, "rejection": "synthetic"}}


def p_value(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """Of a chi-squared test of homogeneity; texts too rare for it are put together by their sum."""
    counts = [collections.Counter(texts) for texts in (one, other)]
    table: dict[object, list[int]] = collections.defaultdict(lambda: [0, 0])
    for text in set(counts[0]) | set(counts[1]):
        both = [count[text] for count in counts]
        cell = table[text if sum(both) >= 20 else sum(text) % 8]
        cell[0] += both[0]
        cell[1] += both[1]
    return float(stats.chi2_contingency(np.array(list(table.values())).T).pvalue)


def main() -> None:
    """Sample with every configuration, test, print, and exit by what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", default=str(cpu_case.SHIPPED_PAIR), help="folder of target and draft")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--temperature", type=float, default=1.2)
    parser.add_argument("--json", action="store_true", help="print the document instead of the table")
    parser.add_argument("--out", type=Path, help="also write the document to this file")
    options = parser.parse_args()
    texts, lengths = {}, {}
    for number, (name, settings) in enumerate((PLAIN | LOSSLESS | LOSSY).items()):
        case = cpu_case.Case(
            pair=options.pair,
            prompts=(1,),
            samples=options.samples,
            temperature=options.temperature,
            max_tokens=2 * PREFIX,
            seed=1_000_000 * number,
            **settings,
        )
        result = cpu_case.run(case)["1"]
        texts[name] = [tuple(tokens[:PREFIX]) for tokens in result["token_ids"][0]]
        lengths[name] = result["acceptance_length"]
        print(f"{name}: done", file=sys.stderr)
    pooled = texts["none"] + texts["none again"]
    p = {"none again": p_value(texts["none"], texts["none again"])}
    p |= {name: p_value(pooled, texts[name]) for name in LOSSLESS | LOSSY}
    failures = [name for name in p if (p[name] < BIASED) != (name in LOSSY)]
    document = {
        "p_values": p,
        "acceptance_length": lengths,
        "failures": failures,
        "samples": options.samples,
        "temperature": options.temperature,
        "distinct_texts": len(set(pooled)),
    } | cpu_case.machine()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document) if options.json else "\n".join(f"{name:32} p = {p[name]:.3g}" for name in p))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
