"""One load level: `vllm bench serve` against a running engine, and what its result says.

    TTFT        first token - sent                                     milliseconds
    TPOT        (latency - TTFT) / (output tokens - 1), per request    milliseconds; none for one token
    chunk gap   time between two chunks of one answer                  milliseconds; a reader's stutter
    goodput     requests that meet every limit / duration              requests per second

The first chunk is taken to hold one token, which it does in vLLM: the prefill's. A chunk gap is vLLM's "ITL";
under speculation it is a step of several tokens, so its mean is about acceptance length times TPOT.

The load is a closed loop, `concurrency` requests in flight until the prompts are used up, or with a `rate`
an open one, by a Poisson process. Lateness is the client's own: in a closed loop the time from an answer's
end to the next request, in an open one the time a request waited past its arrival. Large, and the client
was the bottleneck.

Not covered: trimming ramp and drain; output tokens/s include both, so send many times `concurrency` requests.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark_deploy.errors import MeasurementError
from dspark_deploy.launch.command import vllm_program
from dspark_deploy.launch.log import meaningful_lines
from dspark_deploy.launch.rundir import make_folder, write_atomically
from dspark_deploy.launch.supervised import Supervised
from dspark_deploy.plain_json import parse_json
from tuning.per_request import RequestSteps, from_chunks
from tuning.workload import Requests

QUANTILES = (50, 90, 99)


class LoadFailedError(MeasurementError):
    """The load did not run, or requests in it failed: there is no number to report."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load level. Milliseconds; tokens are output tokens. Lists are per request, in prompt order."""

    concurrency: int
    requests: int
    duration_s: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: list[float]
    tpot_ms: list[float | None]
    output_lens: list[int] = field(default_factory=list)
    chunk_gaps_ms: list[list[float]] = field(default_factory=list)
    lateness_ms: list[float] = field(default_factory=list)
    goodput_per_s: float | None = None
    rate: float | None = None

    @property
    def mean_tpot_ms(self) -> float:
        """Mean over requests of their TPOT."""
        return float(np.mean(self.measured_tpot_ms))

    @property
    def measured_tpot_ms(self) -> list[float]:
        """TPOT of the requests that have one."""
        return [value for value in self.tpot_ms if value is not None]

    @property
    def steps(self) -> list[RequestSteps]:
        """The requests as steps, a chunk being one. See `per_request` for when that may be believed."""
        return [
            from_chunks(tokens, 1 + len(gaps))
            for tokens, gaps in zip(self.output_lens, self.chunk_gaps_ms, strict=True)
            if tokens > 1
        ]

    def percentile(self, name: str, q: float) -> float:
        """Percentile `q` (0 to 100) of `ttft_ms` or `tpot_ms`, over requests."""
        return float(np.percentile([v for v in getattr(self, name) if v is not None], q))

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON values, which `LoadResult(**...)` takes back."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `requests`, at most `concurrency` at a time, at most `output_tokens` each.

    `rate` makes it an open loop, in requests per second. `limits` are milliseconds by vLLM's names: ttft,
    tpot, e2el. `chat` sends prompts as messages, for the server's own template.
    """

    concurrency: int
    requests: Requests
    output_tokens: int
    temperature: float
    rate: float | None = None
    ignore_eos: bool = False
    chat: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)


def request_tpot_ms(latency_s: float, ttft_s: float, output_tokens: int) -> float | None:
    """TPOT of one request in milliseconds; None for an answer of fewer than two tokens."""
    return (latency_s - ttft_s) / (output_tokens - 1) * 1000 if output_tokens > 1 else None


def run_load(
    load: Load, *, url: str, model: str, tokenizer: str, distribution: str, folder: Path, timeout_s: float
) -> LoadResult:
    """Run `vllm bench serve`; its files stay in `folder`. Raises LoadFailedError."""
    make_folder(folder)
    result, log = folder / "bench.json", folder / "bench.log"
    result.unlink(missing_ok=True)
    command = [
        *vllm_program(distribution),
        *("bench", "serve", "--base-url", url, "--model", model, "--tokenizer", tokenizer),
        *_arguments(load, folder),
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
        return read_result(parse_json(result.read_text()), load.concurrency, load.rate)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadFailedError(f"{result}: is no result of vllm bench serve: {error!r}") from error


def _arguments(load: Load, folder: Path) -> list[str]:
    """The flags that say what is sent; prompts of ours are written to a file for vLLM to read."""
    found = [*("--num-prompts", str(load.requests.count), "--temperature", str(load.temperature))]
    found += ["--disable-tqdm", "--backend", "openai-chat" if load.chat else "vllm"]
    if load.chat:
        found += ["--endpoint", "/v1/chat/completions"]
    if load.rate is None:
        found += ["--max-concurrency", str(load.concurrency)]
    else:
        found += ["--request-rate", str(load.rate)]
    if load.ignore_eos:
        found.append("--ignore-eos")
    if load.limits:
        found += ["--goodput", *(f"{name}:{limit:g}" for name, limit in load.limits.items())]
    if load.requests.arguments:
        return found + list(load.requests.arguments)
    dataset = folder / "prompts.jsonl"
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in load.requests.prompts)
    write_atomically(dataset, "".join(lines))
    return [
        *found,
        *("--dataset-name", "custom", "--dataset-path", str(dataset.resolve()), "--disable-shuffle"),
        *("--skip-chat-template", "--custom-output-len", str(load.output_tokens)),
    ]


def read_result(document: dict[str, Any], concurrency: int, rate: float | None = None) -> LoadResult:
    """What `vllm bench serve --save-detailed` wrote. Raises LoadFailedError where a request failed."""
    errors = [error for error in document["errors"] if error]
    if errors or document["failed"]:
        raise LoadFailedError(
            f"{max(len(errors), document['failed'])} requests failed; the first: {errors[:1]}"
        )
    if not any(count > 1 for count in document["output_lens"]):
        raise LoadFailedError("no answer has two tokens, so there is no TPOT; does the model stop at once?")
    latencies = _latencies(document)
    rows = zip(latencies, document["ttfts"], document["output_lens"], strict=True)
    return LoadResult(
        concurrency=concurrency,
        requests=document["completed"],
        duration_s=document["duration"],
        output_tokens=document["total_output_tokens"],
        output_tokens_per_s=document["output_throughput"],
        ttft_ms=[value * 1000 for value in document["ttfts"]],
        tpot_ms=[request_tpot_ms(*row) for row in rows],
        output_lens=list(document["output_lens"]),
        chunk_gaps_ms=[[gap * 1000 for gap in gaps] for gaps in document.get("itls", [])]
        or [[] for _ in latencies],
        lateness_ms=lateness_ms(document, latencies, None if rate is not None else concurrency),
        goodput_per_s=document.get("request_goodput"),
        rate=rate,
    )


def _latencies(document: dict[str, Any]) -> list[float]:
    """Seconds per request. vLLM before 0.28 writes only the first token's and the gaps between chunks."""
    if "latencies" in document:
        return list(document["latencies"])
    gaps = zip(document["ttfts"], document["itls"], strict=True)
    return [first + sum(between) for first, between in gaps]


def lateness_ms(document: dict[str, Any], latencies: Sequence[float], concurrency: int | None) -> list[float]:
    """How late the client was, per request; empty where vLLM doesn't write when requests were sent.

    A closed loop of width `concurrency` may send its request i (from 0) when i - concurrency + 1 answers
    have ended. Without a width, vLLM's own time between arrival and sending.
    """
    starts = document.get("start_times")
    if concurrency is None or not starts:
        return [wait * 1000 for wait in document.get("queue_times") or []]
    ends = sorted(start + latency for start, latency in zip(starts, latencies, strict=True))
    later = sorted(starts)[concurrency:]
    return [max(start - end, 0.0) * 1000 for start, end in zip(later, ends, strict=False)]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 by name; empty without values."""
    if not values or any(math.isnan(value) for value in values):
        return {}
    return {f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}
