"""DeepSeek-V4 at its own geometry on a CUDA GPU: DSpark served, and what its fused mHC operators are worth.

    python -m bench.gpu.v4 --work FOLDER --out bench/results/gpu_v4.json

Writes `bench.gpu.v4_checkpoint` into FOLDER, then runs one process a row, with caches there:

    keys           mHC's TileLang keys at these token counts, compiled by the warm-up's own workers
    fused k=5      vLLM's engine in the process, target and draft on the fused kernels
    torch k=5      the same, with vLLM's torch reference in place of every fused mHC operator
    fused none, torch none     without speculation
    serve          `dspark-serve` with `bench/gpu/v4.yaml`, and completions over HTTP

An engine row has the seconds and the compiles of each phase of its start (TileLang and Triton as the
product's capture guard counts them, DeepGEMM by its cache folder; a phase within another counts for itself
alone), then the time of a step: decoding of N and of 5 N tokens, so that prefill and start cancel out,
divided by the steps that vLLM's metrics count. The
weights are random, so a draft is accepted by chance and a step gives one token. The reference's arm captures
graphs, too. Rows that the document has are kept, so that a run can be split over several leases of a machine.

Needs vLLM 0.26.0 and TileLang. Not covered: text quality, acceptance, more than one GPU, AMD.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.gpu import v4_checkpoint, v4_rows
from bench.gpu.guard import guarded
from dspark_deploy.plugin.amd.compiles import Compiles, Phase
from dspark_deploy.plugin.amd.requests import recording
from dspark_deploy.plugin.amd.warmup import compile_all

MODEL, DRAFT = "vllm.models.deepseek_v4.nvidia.model", "vllm.models.deepseek_v4.nvidia.dspark"
TILELANG, REFERENCE = "vllm.model_executor.kernels.mhc.tilelang", "vllm.model_executor.kernels.mhc.torch"
ROWS = ("keys", "fused k=5", "torch k=5", "fused none", "torch none", "serve")
K = 5
BATCHES = (1, 8)
SHORT, LONG, REPEATS, PROMPT = 32, 160, 5, 16
TOP = 20  # vLLM's own limit
PROGRAM = "bench.gpu.v4"
# dspark-serve starts vLLM as a person does, with the product's plugin.
SERVED: dict[str, None] = dict.fromkeys(v4_rows.IN_PROCESS)


def arguments_of_mhc(tokens: int) -> dict[str, Callable[[Any], Any]]:
    """One call of each mHC function of vLLM's NVIDIA model at this token count, by the function's name."""
    hidden, streams = v4_checkpoint.HIDDEN, v4_checkpoint.STREAMS
    mixes, wide = streams * (streams + 2), streams * hidden

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, 0.01, dtype=dtype, device="cuda")

    x, residual = (
        full(tokens, hidden, dtype=torch.bfloat16),
        full(tokens, streams, hidden, dtype=torch.bfloat16),
    )
    post, comb = full(tokens, streams, 1), full(tokens, streams, streams)
    fn, scale, base, weight = full(mixes, wide), full(3), full(mixes), full(hidden, dtype=torch.bfloat16)
    rest = (fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20)
    norm = {"norm_weight": weight, "norm_eps": 1e-6}
    return {
        "mhc_pre_broadcast_tilelang": lambda f: f(x, *rest, **norm, fn_broadcast=full(mixes, hidden)),
        "mhc_pre_tilelang": lambda f: f(residual, *rest, **norm),
        "mhc_fused_post_pre_tilelang": lambda f: f(
            x, residual, post, comb, *rest, n_splits=1, tile_n=1, **norm
        ),
        "mhc_post_tilelang": lambda f: f(x, residual, post, comb),
        "hc_head_fused_kernel_tilelang": lambda f: f(
            residual, full(streams, wide), full(1), full(streams), 1e-6, 1e-6
        ),
    }


def keys() -> dict[str, Any]:
    """Ask for every key of mHC over all token counts of a step, and compile what is not on disk."""
    compiles = Compiles("warn")
    guarded(compiles)
    functions = importlib.import_module(TILELANG)
    compiles.enter(Phase.WARMUP)
    with recording({}) as recorded, torch.inference_mode():
        # DeepGEMM's projection, which isn't TileLang's, is compiled by the engines that need it.
        functions_of_deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
        with _replaced(functions_of_deep_gemm, "tf32_hc_prenorm_gemm", lambda *_args: None):
            for recorded.tokens in range(1, v4_rows.BATCHED + 1):
                for name, call in arguments_of_mhc(recorded.tokens).items():
                    call(getattr(functions, name))
    started = time.perf_counter()
    compile_all(list(recorded.requests.values()), compiles, None)
    sources = [record.source for record in compiles.records]
    return {
        "keys": sorted(f"{request.kernel} {request.key[0]}" for request in recorded.requests.values()),
        "compile_seconds": round(time.perf_counter() - started, 2),
        "seconds_of_each": [record.seconds for record in compiles.records],
        "compiled": sources.count("compiled"),
        "from_disk": sources.count("disk"),
    }


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def use_reference() -> None:
    """Put vLLM's torch reference, with torch's own RMSNorm, in the place of every fused mHC operator."""
    reference = importlib.import_module(REFERENCE)

    def pre(residual: Any, *rest: Any, norm_weight: Any = None, norm_eps: float = 1e-6, **_: Any) -> Any:
        post, comb, layer_input = reference.mhc_pre_torch(residual, *rest)
        if norm_weight is not None:
            shape = (layer_input.shape[-1],)
            layer_input = torch.nn.functional.rms_norm(layer_input, shape, norm_weight, norm_eps)
        return post, comb, layer_input

    def broadcast(x: Any, *rest: Any, fn_broadcast: Any = None, **norm: Any) -> Any:
        residual = x[:, None].repeat(1, v4_checkpoint.STREAMS, 1)
        return residual, *pre(residual, *rest, **norm)

    def fused(x: Any, residual: Any, post: Any, comb: Any, *rest: Any, **norm: Any) -> Any:
        residual = reference.mhc_post_torch(x, residual, post, comb)
        return residual, *pre(residual, *rest, **norm)

    def head(x: Any, fn: Any, scale: Any, base: Any, rms_eps: float, eps: float) -> Any:
        flat = x.flatten(1).float()
        mixes = flat @ fn.t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
        gate = torch.sigmoid(mixes * scale + base) + eps
        return (gate[..., None] * x.float()).sum(1).to(x.dtype)

    replacements = {
        "mhc_pre_tilelang": pre,
        "mhc_pre_broadcast_tilelang": broadcast,
        "mhc_fused_post_pre_tilelang": fused,
        "mhc_post_tilelang": reference.mhc_post_torch,
        "hc_head_fused_kernel_tilelang": head,
    }
    for module in map(importlib.import_module, (MODEL, DRAFT)):
        found = [name for name in replacements if hasattr(module, name)]
        assert found, f"{module.__name__} has none of vLLM's mHC functions"
        for name in found:
            setattr(module, name, replacements[name])


class Phases:
    """Seconds of each phase of a start, and DeepGEMM's kernels by phase, from its cache folder."""

    def __init__(self, compiles: Compiles) -> None:
        self.compiles, self.seconds, self.deep_gemm = compiles, dict[str, float](), dict[str, int]()

    def during(self, phase: Phase, owner: Any, name: str) -> None:
        """Count what `owner.name` takes and compiles under `phase`, and return to the phase before it."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            outer = self.compiles.phase
            self.compiles.enter(phase)
            kernels, started = _deep_gemm_kernels(), time.perf_counter()
            within = sum(self.seconds.values()), sum(self.deep_gemm.values())
            try:
                return original(*args, **kwargs)
            finally:
                label = f"{phase}: {name}"
                # What a phase inside this one has taken is that one's.
                inner = sum(self.seconds.values()) - within[0], sum(self.deep_gemm.values()) - within[1]
                self.seconds[label] = round(time.perf_counter() - started - inner[0], 2)
                self.deep_gemm[label] = _deep_gemm_kernels() - kernels - inner[1]
                self.compiles.enter(outer)

        setattr(owner, name, watched)


def _deep_gemm_kernels() -> int:
    return sum(1 for _ in Path(os.environ["DG_JIT_CACHE_DIR"]).glob("cache/*"))


def engine(arm: str, checkpoint: Path) -> dict[str, Any]:
    """One start of vLLM in this process, and its step times."""
    provider, _, speculation = arm.partition(" ")
    compiles = Compiles("warn")
    guarded(compiles)
    started = time.perf_counter()
    from vllm import LLM

    phases = Phases(compiles)
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    runner = importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    phases.during(Phase.LOAD, worker, "load_model")
    phases.during(Phase.WARMUP, worker, "determine_available_memory")
    phases.during(Phase.WARMUP, worker, "compile_or_warm_up_model")
    phases.during(Phase.CAPTURE, runner, "capture_model")
    if provider == "torch":
        use_reference()
    width = 1 if speculation == "none" else K + 1
    imported = time.perf_counter() - started
    llm = LLM(
        **v4_rows.engine_settings(checkpoint, 0 if speculation == "none" else K),
        gpu_memory_utilization=0.5,
        compilation_config={"cudagraph_capture_sizes": [batch * width for batch in BATCHES]},
    )
    boot = time.perf_counter() - started
    compiles.enter(Phase.SERVING)
    serving = _deep_gemm_kernels()
    row: dict[str, Any] = {"boot_seconds": round(boot, 1), "import_seconds": round(imported, 1)}
    row |= {"phase_seconds": phases.seconds, "deep_gemm": phases.deep_gemm}
    row["finite"] = _finite(llm)
    row["step"] = [_step_time(llm, batch, speculation != "none") for batch in BATCHES]
    row["tokens"] = _generate(llm, 1, SHORT)[1][0]
    # Twice: what one engine gives for one prompt, before one row is compared with another.
    row["first_token_logprobs"] = [_first_token(llm) for _ in range(2)]
    row["deep_gemm"]["serving"] = _deep_gemm_kernels() - serving
    found = compiles.as_json()
    row["compiled"], row["from_disk"] = found["compiled"], found["from_disk"]
    row["slowest"] = [
        {
            "library": r.library,
            "kernel": r.kernel,
            "phase": str(r.phase),
            "seconds": r.seconds,
            "source": r.source,
        }
        for r in sorted(compiles.records, key=lambda r: -r.seconds)[:8]
    ]
    row["compiled_after_warm_up"] = [
        f"{r.library} {r.kernel} {r.phase} {r.tokens}"
        for r in compiles.records
        if r.phase in (Phase.CAPTURE, Phase.SERVING) and r.source == "compiled"
    ]
    return row


def _generate(
    llm: Any, batch: int, tokens: int, logprobs: int | None = None
) -> tuple[float, list[list[int]], Any]:
    from vllm import SamplingParams

    random = torch.Generator().manual_seed(batch)
    prompts = [
        {"prompt_token_ids": torch.randint(3, v4_checkpoint.VOCABULARY, (PROMPT,), generator=random).tolist()}
        for _ in range(batch)
    ]
    parameters = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    started = time.perf_counter()
    results = llm.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - started
    return seconds, [list(result.outputs[0].token_ids) for result in results], results


def _finite(llm: Any) -> bool:
    """Whether the logprobs of some tokens are finite: a tensor that the checkpoint lacks would be garbage."""
    _, _, results = _generate(llm, 1, 8, logprobs=1)
    values = [entry.logprob for step in results[0].outputs[0].logprobs for entry in step.values()]
    return bool(values) and all(abs(value) < 1e30 for value in values)


def _first_token(llm: Any) -> dict[str, float]:
    """The most probable first tokens of the prompt that `tokens` continues, with their logprobs."""
    _, _, results = _generate(llm, 1, 1, logprobs=TOP)
    found = results[0].outputs[0].logprobs[0]
    ranked = sorted(found.items(), key=lambda item: -item[1].logprob)
    return {str(token): round(entry.logprob, 5) for token, entry in ranked}


def _counted(llm: Any, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


def _step_time(llm: Any, batch: int, speculates: bool) -> dict[str, Any]:
    """Milliseconds of a decoding step at this batch, median of the repeats, and tokens a step and request."""
    _generate(llm, batch, LONG)
    times = []
    tokens_a_step = 1.0
    for _ in range(REPEATS):
        short, _, _ = _generate(llm, batch, SHORT)
        drafts = _counted(llm, "vllm:spec_decode_num_drafts") if speculates else 0
        long, _, _ = _generate(llm, batch, LONG)
        if speculates:
            drafts = _counted(llm, "vllm:spec_decode_num_drafts") - drafts
            tokens_a_step = batch * (LONG - 1) / drafts
        times.append(1000 * (long - short) * tokens_a_step / (LONG - SHORT))
    return {
        "batch": batch,
        "step_ms": round(statistics.median(times), 3),
        "all_ms": [round(each, 3) for each in times],
        "tokens_a_step": round(tokens_a_step, 4),
    }


def serve(checkpoint: Path, work: Path) -> dict[str, Any]:
    """`dspark-serve` as a person runs it, completions over HTTP, and what it reports of itself."""
    command = [
        sys.executable,
        "-m",
        "dspark_deploy.serve",
        "--profile",
        "bench/gpu/v4.yaml",
        "--quiet",
        "--json",
    ]
    command += ["--model", str(checkpoint), "--run-dir", str(work / "runs")]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("{"):
                    break
            if not lines or not lines[-1].startswith("{"):
                return {"error": "".join(lines)[-3000:]}
            ready = json.loads(lines[-1])
            row: dict[str, Any] = {"ready_seconds": round(time.perf_counter() - started, 1)}
            if ready.get("status") != "ready":
                return row | {"error": ready}
            url = ready["url"]
            request = {"model": "v4", "prompt": list(range(3, 19)), "max_tokens": LONG, "ignore_eos": True}
            walls = []
            for _ in range(REPEATS):
                sent = time.perf_counter()
                answer = httpx.post(f"{url}/v1/completions", json=request | {"temperature": 0}, timeout=120)
                answer.raise_for_status()
                walls.append(time.perf_counter() - sent)
            usage = answer.json()["usage"]
            page = httpx.get(f"{url}/metrics", timeout=30).text
            row["completion_tokens"] = usage["completion_tokens"]
            row["request_ms_a_token"] = round(1000 * statistics.median(walls) / LONG, 3)
            row["metrics"] = [
                each
                for each in page.splitlines()
                if each.startswith("vllm:spec_decode_num") and "_total" in each
            ]
            row["processes"] = ready["processes"]
            return row
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def child(row: str, work: Path) -> dict[str, Any]:
    """One row. The environment is set already."""
    if row == "keys":
        return keys()
    if row == "serve":
        return serve(work / "checkpoint", work)
    return engine(row, work / "checkpoint")


def main() -> None:
    """Run one process per missing row; a row that fails holds its last words."""
    v4_rows.run(PROGRAM, __doc__.partition("\n")[0], ROWS, child, environments={"serve": SERVED})


if __name__ == "__main__":
    main()
