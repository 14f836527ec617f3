"""One process a row over DeepSeek-V4's checkpoint, for `bench.gpu.v4` and `bench.gpu.v4_graphs`.

Not a command of its own. Writes the checkpoint where it is missing, keeps rows that the document has, so that
a run can be split over several leases of a machine, and puts the last words of a row that fails into it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import start, v4_checkpoint
from bench.gpu.kernels import version

SEQUENCES, BATCHED, LENGTH = 8, 256, 1024
ROW_SECONDS = 700
CACHES = {
    "TILELANG_CACHE_DIR": "tilelang",
    "TRITON_CACHE_DIR": "triton",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "VLLM_CACHE_ROOT": "vllm",
}
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "HF_HUB_OFFLINE": "1",
}
# vLLM gives DeepSeek-V4 breakable graphs when it reads the configuration, after it has imported the model,
# whose code looks at the variable once, on import. `vllm serve` starts its engine's process afterwards; an
# engine in this process needs it from the start, or attention over a prompt is captured with all the rest.
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", BREAKABLE: "1"}


def engine_settings(checkpoint: Path, k: int) -> dict[str, Any]:
    """What every engine of these benchmarks is started with; `k` of 0 is no speculation."""
    return {
        "model": str(checkpoint),
        "tokenizer_mode": "hf",
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "block_size": 256,
        "max_model_len": LENGTH,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": BATCHED,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        "speculative_config": {"method": "dspark", "num_speculative_tokens": k} if k else None,
    }


def run(
    program: str,
    description: str,
    rows: Sequence[str],
    one: Callable[[str, Path], dict[str, Any]],
    environments: Mapping[str, Mapping[str, str | None]] | None = None,
    conclude: Callable[[Path], None] | None = None,
) -> None:
    """A benchmark's whole command. `one` measures a row, given its name and the work folder.

    Its process has the environment already: `IN_PROCESS`, since the engine is in the row's process, and over
    it what `environments` names for the row, where None takes a variable away. `conclude` may add to the
    document once its rows are there.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="checkpoint and caches; 7 GB")
    parser.add_argument("--rows", default=",".join(rows), help="which rows, in order, with commas")
    parser.add_argument("--row", choices=rows, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = arguments.rows.split(",")
    if unknown := [row for row in wanted if row not in rows]:
        parser.error(f"--rows: there is no row {unknown[0]!r}; there are {', '.join(rows)}")
    start.require(program)
    if arguments.row:
        arguments.out.write_text(json.dumps(one(arguments.row, arguments.work)))
        return
    work = arguments.work.resolve()
    checkpoint = work / "checkpoint"
    if not (checkpoint / "tokenizer.json").exists():
        started = time.perf_counter()
        v4_checkpoint.write(checkpoint)
        print(f"checkpoint written in {time.perf_counter() - started:.0f} s", flush=True)
    document: dict[str, Any] = {"rows": {}}
    if arguments.out.exists():
        document = json.loads(arguments.out.read_text())
    document |= {
        **start.heading(program),
        "versions": {name: version(name) for name in ("torch", "triton", "tilelang", "vllm")},
        "model": {
            name: v4_checkpoint.CONFIG[name] for name in ("num_hidden_layers", "n_mtp_layers", "hidden_size")
        },
    }
    environment = os.environ | ENVIRONMENT | {name: str(work / folder) for name, folder in CACHES.items()}
    environment |= IN_PROCESS
    for row in wanted:
        if "error" in document["rows"].get(row, {"error": "missing"}):
            host = {"host": document["machine"]["host"], "date": document["date"]}
            own: Mapping[str, str | None] = environment | dict((environments or {}).get(row, {}))
            given = {name: value for name, value in own.items() if value is not None}
            document["rows"][row] = _process(program, row, work, given) | host
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
            print(row, json.dumps(document["rows"][row])[:2000], flush=True)
    if conclude is not None:
        conclude(arguments.out)
    start.conclude(program, sum("error" in row for row in document["rows"].values()))


def _process(program: str, row: str, work: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    name = "".join(letter if letter.isalnum() else "-" for letter in row)
    result, log = work / "row.json", work / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", program, "--out", str(result), "--work", str(work), "--row", row]
    with log.open("w") as output:
        try:
            subprocess.run(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=ROW_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"did not end within {ROW_SECONDS} s", "log": log.read_text()[-1500:]}
    if result.exists():
        return json.loads(result.read_text())  # type: ignore[no-any-return]
    return {"error": log.read_text()[-3000:]}
