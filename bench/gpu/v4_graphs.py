"""DeepSeek-V4's greedy answers with and without CUDA graphs and speculation: which of them changes one.

    python -m bench.gpu.v4_graphs --work FOLDER --out bench/results/gpu_v4_graphs.json

The checkpoint of `bench.gpu.v4_checkpoint`, one process and one engine a row:

    none eager, k=5 eager       no graphs
    none 48, k=5 48             graphs up to 48 tokens, in which a short prompt's prefill runs, padded, with
                                breaks for attention: VLLM_USE_BREAKABLE_CUDAGRAPH is set from the start
    none 48 late, k=5 48 late   the variable is left to vLLM, which sets it after the model was imported
    k=5 48 spawned, forked      left to vLLM as well, the engine in a process of its own: `vllm serve` spawns
                                it, and VLLM_WORKER_MULTIPROC_METHOD=fork has it inherit the imported model
    k=5 decode only             the same sizes, captured for decoding alone (FULL_DECODE_ONLY)

Each engine is asked for prompts of 4, 16, 48 and 200 tokens: for one token, for 32, and for one again after
eight others were served. A row's `stable` says whether a prompt's first token was the same in all of its
requests; greedy decoding without batching has no reason to differ. `breaks` counts how often a graph, by its
size, gives way to attention (in-process engines alone). The document compares each row's tokens with those of
`none eager`.

The weights are random: many tokens are nearly as probable as the best, so a late difference may be rounding,
an unstable first token is not. Needs vLLM 0.26.0. Not covered: other models.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from bench.gpu import v4_checkpoint, v4_rows

PROGRAM = "bench.gpu.v4_graphs"
K = 5
MULTIPROCESSING, METHOD = "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"


class Row(NamedTuple):
    """One engine: its drafts a step, its arguments on graphs, and what it changes in the environment."""

    k: int
    graphs: dict[str, Any]
    environment: Mapping[str, str | None] = MappingProxyType({})


def sized(k: int, **more: str) -> dict[str, Any]:
    """Graphs of one step of one request, and of a full batch: 48 tokens in either case."""
    sizes = [K + 1, v4_rows.SEQUENCES * (K + 1)] if k else [1, 8, 48]
    return {"compilation_config": {"cudagraph_capture_sizes": sizes, **more}}


LATE: dict[str, str | None] = {v4_rows.BREAKABLE: None}


def _apart(method: str) -> dict[str, str | None]:
    # Without NVML torch opens the driver to count GPUs, and a process forked afterwards can't use it.
    return LATE | {MULTIPROCESSING: "1", METHOD: method, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


ROWS = {
    "none eager": Row(0, {"enforce_eager": True}),
    "k=5 eager": Row(K, {"enforce_eager": True}),
    "none 48": Row(0, sized(0)),
    "k=5 48": Row(K, sized(K)),
    "none 48 late": Row(0, sized(0), LATE),
    "k=5 48 late": Row(K, sized(K), LATE),
    "k=5 48 spawned": Row(K, sized(K), _apart("spawn")),
    "k=5 48 forked": Row(K, sized(K), _apart("fork")),
    "k=5 decode only": Row(K, sized(K, cudagraph_mode="FULL_DECODE_ONLY")),
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

    settings = v4_rows.engine_settings(work / "checkpoint", ROWS[row].k)
    llm = LLM(**settings, gpu_memory_utilization=0.2, kv_cache_memory_bytes=2 << 30, **ROWS[row].graphs)

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
    return {"breaks": breaks(), "prompts": found}


def breaks() -> dict[str, int]:
    """Of each graph in this process that may give way to attention: how often it does, by its tokens."""
    module = importlib.import_module("vllm.compilation.breakable_cudagraph")
    entries = [
        entry
        for runner in module.BreakableCUDAGraphWrapper._all_instances
        for entry in runner.entries.items()
    ]
    return {
        str(batch.num_tokens): entry.capture.num_eager_breaks for batch, entry in entries if entry.capture
    }


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
    environments = {name: row.environment for name, row in ROWS.items()}
    v4_rows.run(PROGRAM, __doc__.partition("\n")[0], tuple(ROWS), one, environments, conclude)


def conclude(out: Path) -> None:
    """Write the comparison into the document."""
    document = json.loads(out.read_text())
    document["tokens_as_none_eager"] = compared(document["rows"])
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
