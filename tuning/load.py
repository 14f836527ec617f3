"""One load level: `vllm bench serve` against a running engine, and what its result says.

    TTFT   first token - sent                                     milliseconds
    TPOT   (latency - TTFT) / (output tokens - 1), per request    milliseconds; one-token answers have none

vLLM's own "ITL" is a gap between chunks, of several tokens each under speculation; it is not used.
The load is a closed loop: `concurrency` requests are in flight until the prompts are used up.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark_deploy.errors import MeasurementError
from dspark_deploy.launch.command import vllm_program
from dspark_deploy.launch.log import meaningful_lines
from dspark_deploy.launch.rundir import write_atomically
from dspark_deploy.launch.supervised import Supervised


class LoadFailedError(MeasurementError):
    """The load did not run, or requests in it failed: there is no number to report."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load level. Milliseconds; tokens are output tokens. `tpot_ms` is per request, in prompt order."""

    concurrency: int
    requests: int
    duration_s: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: list[float]
    tpot_ms: list[float | None]

    @property
    def mean_tpot_ms(self) -> float:
        """Mean over requests of their TPOT."""
        return float(np.mean(self.measured_tpot_ms))

    @property
    def measured_tpot_ms(self) -> list[float]:
        """TPOT of the requests that have one."""
        return [value for value in self.tpot_ms if value is not None]

    def percentile(self, name: str, q: float) -> float:
        """Percentile `q` (0 to 100) of `ttft_ms` or `tpot_ms`, over requests."""
        return float(np.percentile([v for v in getattr(self, name) if v is not None], q))

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON values, which `LoadResult(**...)` takes back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `prompts`, at most `concurrency` at a time, at most `output_tokens` each."""

    concurrency: int
    prompts: Sequence[str]
    output_tokens: int
    temperature: float


def request_tpot_ms(latency_s: float, ttft_s: float, output_tokens: int) -> float | None:
    """TPOT of one request in milliseconds; None for an answer of fewer than two tokens."""
    return (latency_s - ttft_s) / (output_tokens - 1) * 1000 if output_tokens > 1 else None


def run_load(
    load: Load, *, url: str, model: str, tokenizer: str, distribution: str, folder: Path, timeout_s: float
) -> LoadResult:
    """Run `vllm bench serve`; its files stay in `folder`. Raises LoadFailedError."""
    folder.mkdir(parents=True, exist_ok=True)
    dataset, result, log = (folder / name for name in ("prompts.jsonl", "bench.json", "bench.log"))
    result.unlink(missing_ok=True)
    write_atomically(dataset, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in load.prompts))
    command = [
        *vllm_program(distribution),
        *("bench", "serve", "--backend", "vllm", "--base-url", url, "--model", model),
        *("--tokenizer", tokenizer, "--dataset-name", "custom", "--dataset-path", str(dataset.resolve())),
        *("--num-prompts", str(len(load.prompts)), "--disable-shuffle", "--skip-chat-template"),
        *("--custom-output-len", str(load.output_tokens), "--temperature", str(load.temperature)),
        *("--max-concurrency", str(load.concurrency), "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder.resolve())),
        *("--result-filename", result.name),
    ]
    with Supervised(command, {**os.environ, "HF_HUB_OFFLINE": "1"}, log, grace_s=5) as process:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LoadFailedError(
                f"vllm bench serve did not end within {timeout_s:.0f} s; see {log}"
            ) from None
    if code != 0 or not result.is_file():
        lines = "\n".join(f"    {line}" for line in meaningful_lines(log))
        raise LoadFailedError(f"vllm bench serve exited with code {code}:\n{lines}")
    try:
        return read_result(json.loads(result.read_text()), load.concurrency)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadFailedError(f"{result}: is no result of vllm bench serve: {error!r}") from error


def read_result(document: dict[str, Any], concurrency: int) -> LoadResult:
    """What `vllm bench serve --save-detailed` wrote. Raises LoadFailedError where a request failed."""
    errors = [error for error in document["errors"] if error]
    if errors or document["failed"]:
        raise LoadFailedError(
            f"{max(len(errors), document['failed'])} requests failed; the first: {errors[:1]}"
        )
    if not any(count > 1 for count in document["output_lens"]):
        raise LoadFailedError("no answer has two tokens, so there is no TPOT; does the model stop at once?")
    rows = zip(_latencies(document), document["ttfts"], document["output_lens"], strict=True)
    return LoadResult(
        concurrency=concurrency,
        requests=document["completed"],
        duration_s=document["duration"],
        output_tokens=document["total_output_tokens"],
        output_tokens_per_s=document["output_throughput"],
        ttft_ms=[value * 1000 for value in document["ttfts"]],
        tpot_ms=[request_tpot_ms(*row) for row in rows],
    )


def _latencies(document: dict[str, Any]) -> list[float]:
    """Seconds per request. vLLM before 0.28 writes only the first token's and the gaps between chunks."""
    if "latencies" in document:
        return list(document["latencies"])
    gaps = zip(document["ttfts"], document["itls"], strict=True)
    return [first + sum(between) for first, between in gaps]
