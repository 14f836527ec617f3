"""DeepSeek-V4's greedy answers with and without CUDA graphs and speculation: which of them changes one.

    python -m bench.gpu.v4_graphs --work FOLDER --out bench/results/gpu_v4_graphs.json

The checkpoint of `bench.gpu.v4_checkpoint`, one process and one engine a row:

    none eager, k=5 eager              no graphs
    none decode-sized                  graphs of 1 and 8 tokens, which a prompt never fits
    none 48, k=5 48                    graphs up to 48 tokens, in which a short prompt's prefill runs, padded
    none decode only, k=5 decode only  the same sizes, captured for decoding alone (FULL_DECODE_ONLY)

Each engine is asked for prompts of 4, 16, 48 and 200 tokens: for one token, for 32, and for one again after
eight others were served. A row's `stable` says whether a prompt's first token was the same in all of its
requests; greedy decoding without batching has no reason to differ. The document compares each row's tokens
with those of `none eager`.

The weights are random: many tokens are nearly as probable as the best, so a late difference may be rounding,
an unstable first token is not. Needs vLLM 0.26.0. Not covered: why they differ, and other models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bench.gpu import v4_checkpoint, v4_rows

PROGRAM = "bench.gpu.v4_graphs"
K = 5
EAGER: dict[str, Any] = {"enforce_eager": True}
SMALL: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}}
NONE_48 = {"cudagraph_capture_sizes": [1, 8, 48]}
K_48 = {"cudagraph_capture_sizes": [K + 1, v4_rows.SEQUENCES * (K + 1)]}
DECODE_ONLY = {"cudagraph_mode": "FULL_DECODE_ONLY"}
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "none eager": (0, EAGER),
    "k=5 eager": (K, EAGER),
    "none decode-sized": (0, SMALL),
    "none 48": (0, {"compilation_config": NONE_48}),
    "k=5 48": (K, {"compilation_config": K_48}),
    "none decode only": (0, {"compilation_config": NONE_48 | DECODE_ONLY}),
    "k=5 decode only": (K, {"compilation_config": K_48 | DECODE_ONLY}),
}
PROMPTS, LONG, TOP = (4, 16, 48, 200), 32, 5


def prompt(length: int, seed: int) -> dict[str, Any]:
    """A prompt of random tokens."""
    random = torch.Generator().manual_seed(1000 * seed + length)
    tokens = torch.randint(3, v4_checkpoint.VOCABULARY, (length,), generator=random)
    return {"prompt_token_ids": tokens.tolist()}


def one(row: str, work: Path) -> dict[str, Any]:
    """The answers of one engine, by the prompt's length."""
    from vllm import LLM, SamplingParams

    k, graphs = ROWS[row]
    settings = v4_rows.engine_settings(work / "checkpoint", k)
    llm = LLM(**settings, gpu_memory_utilization=0.2, kv_cache_memory_bytes=2 << 30, **graphs)

    def ask(prompts: list[dict[str, Any]], tokens: int, logprobs: int | None = None) -> Any:
        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        return llm.generate(prompts, parameters, use_tqdm=False)[0].outputs[0]

    found: dict[str, Any] = {}
    for length in PROMPTS:
        asked = [prompt(length, seed=1)]
        first = ask(asked, 1, TOP)
        ranked = sorted(first.logprobs[0].items(), key=lambda item: -item[1].logprob)
        long = list(ask(asked, LONG).token_ids)
        again = ask(asked, 1).token_ids[0]
        ask([prompt(16, seed) for seed in range(2, 2 + v4_rows.SEQUENCES)], LONG)
        firsts = [first.token_ids[0], long[0], again, ask(asked, 1).token_ids[0]]
        found[str(length)] = {
            "first_tokens": firsts,
            "stable": len(set(firsts)) == 1,
            "first_token_logprobs": {str(token): round(entry.logprob, 4) for token, entry in ranked[:TOP]},
            "tokens": long,
        }
    return {"prompts": found}


def compared(rows: dict[str, Any]) -> dict[str, dict[str, int | None]]:
    """Per row and prompt: how many of the tokens agree with `none eager`, from the first on.

    None where that row has no answers.
    """
    eager = rows.get("none eager", {}).get("prompts")
    if eager is None:
        return {}
    agree: dict[str, dict[str, int | None]] = {}
    for name, row in rows.items():
        agree[name] = {}
        for length, want in eager.items():
            got = row.get("prompts", {}).get(length)
            pairs = zip(got["tokens"], want["tokens"], strict=True) if got else None
            agree[name][length] = None if pairs is None else _leading(pairs)
    return agree


def _leading(pairs: Any) -> int:
    count = 0
    for got, want in pairs:
        if got != want:
            break
        count += 1
    return count


def main() -> None:
    """Run the rows; then put beside them how far each agrees with the engine without either."""
    v4_rows.run(PROGRAM, __doc__.partition("\n")[0], tuple(ROWS), one, conclude=conclude)


def conclude(out: Path) -> None:
    """Write the comparison into the document."""
    document = json.loads(out.read_text())
    document["tokens_as_none_eager"] = compared(document["rows"])
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
