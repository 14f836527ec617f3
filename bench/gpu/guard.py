"""Warm-up, capture guard and numerics gate on a CUDA GPU: a real compiler, real graph capture, real kernels.

    PYTHONPATH=VLLM_SOURCES:TILELANG_SITE python -m bench.gpu.guard --out bench/results/gpu_guard.json

The mHC operators of vLLM's DeepSeek-V4, on its TileLang kernels, are asked for over the gate's token counts.
Each row is a process of its own:

    parallel       an empty cache on disk, the keys compiled by the warm-up's own workers; then, with
                   jit.guard error, the operators are captured, and a graph asks for a key that wasn't warmed
    second start   the cache that `parallel` left: what is compiled now
    gate           the same cache; a worker loads these operators, as they are and with a planted fault
    serial         an empty cache, the keys compiled one after another

The capture guard, the warm-up and the gate are the product's; on CUDA the product installs only the gate.
Needs TileLang and vLLM's Python sources on PYTHONPATH; vLLM's compiled extensions aren't used. Not covered: a
whole engine's start, DeepGEMM's projection, AMD.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu import start
from bench.gpu.kernels import version
from dspark_deploy.kernels.gate import TOKENS
from dspark_deploy.kernels.mhc_pre import Constants
from dspark_deploy.kernels.references import Geometry, OperatorCase, operator_cases
from dspark_deploy.plugin import gate
from dspark_deploy.plugin.amd import capture_guard
from dspark_deploy.plugin.amd.compiles import CompileRefusedError, Compiles, Phase
from dspark_deploy.plugin.amd.requests import Request, recording
from dspark_deploy.plugin.amd.warmup import compile_all
from tests.support import upstream

HIDDEN, COLD_HIDDEN, STREAMS = 4096, 5120, 4
CAPTURED = (1, 8, 64)
# DeepSeek-V4's. On CUDA, V4.1's delayed operator compiles past TileLang's own lookup: no key to ask for.
OPERATORS = ("MHCPreOp", "MHCPostOp", "MHCFusedPostPreOp", "HCHeadOp")
CASES = ("parallel", "second start", "gate", "serial")
CHILD_SECONDS = 240
PROGRAM = "bench.gpu.guard"


def geometry(hidden: int) -> Geometry:
    return Geometry(hidden, STREAMS, Constants(), fused_norm=True)


def calls(operators: dict[str, Any], hidden: int, tokens: int, device: str) -> list[Callable[[], Any]]:
    """Every case of every operator at one token count, ready to be called."""

    def bind(operator: Any, case: OperatorCase) -> Callable[[], Any]:
        return lambda: operator(**case.arguments)

    return [
        bind(operator, case)
        for name, operator in operators.items()
        for case in operator_cases(name, geometry(hidden), tokens, torch.device(device))
    ]


def guarded(compiles: Compiles) -> None:
    """Watch TileLang, as the plugin does on ROCm. Raises AssertionError where that isn't possible."""
    for module in (capture_guard.TILELANG, capture_guard.TRITON):
        patch = capture_guard.patch(importlib.import_module(module), compiles)
        verdict = patch.examine()
        assert verdict.state is None, f"{patch.name}: {verdict.reason}"
        patch.install()


def asked_for(operators: dict[str, Any]) -> list[Request]:
    """Every TileLang key that the operators ask for over the gate's token counts."""
    with recording(operators) as recorded, torch.inference_mode():
        for recorded.tokens in TOKENS:
            for call in calls(operators, HIDDEN, recorded.tokens, "cuda"):
                call()
    return list(recorded.requests.values())


def warm(operators: dict[str, Any], compiles: Compiles, workers: int | None) -> dict[str, Any]:
    """Compile every key; the records say what came from disk."""
    compiles.enter(Phase.WARMUP)
    started = time.perf_counter()
    requests = asked_for(operators)
    asked = time.perf_counter() - started
    started = time.perf_counter()
    compile_all(requests, compiles, workers)
    sources = [record.source for record in compiles.records]
    return {
        "keys": len(requests),
        "ask_seconds": round(asked, 2),
        "compile_seconds": round(time.perf_counter() - started, 2),
        "compiled": sources.count("compiled"),
        "from_disk": sources.count("disk"),
    }


def captured(operators: dict[str, Any], compiles: Compiles) -> dict[str, Any]:
    """Capture a graph of all operators at each size, in the phase where a compile is refused."""
    before = len(compiles.records)
    compiles.enter(Phase.CAPTURE)
    graphs = []
    with torch.inference_mode():
        for tokens in CAPTURED:
            work = calls(operators, HIDDEN, tokens, "cuda")
            for call in work:  # the eager pass before a capture, which vLLM makes as well
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [call() for call in work]
            # `work` as well, since a replay reads the inputs where they were.
            graphs.append((graph, results, [call() for call in work], work))
    worst = 0.0
    for graph, results, eager, _ in graphs:
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(results, eager, strict=True):
            for a, b in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
                error = float((a.double() - b.double()).norm() / b.double().norm())
                # A NaN, or an output of zeros alone, is no agreement: `max` would pass it by.
                worst = max(worst, error if math.isfinite(error) else math.inf)
    return {
        "graphs": len(graphs),
        "operator_calls_a_graph": len(graphs[0][1]),
        "compiles_in_capture": len(compiles.records) - before,
        "replay_against_eager_nrmse": worst,
    }


def refused_in_capture(operators: dict[str, Any], compiles: Compiles) -> dict[str, Any]:
    """Ask for a key of another hidden size inside a capture; then capture what is warm once more."""
    post = {"MHCPostOp": operators["MHCPostOp"]}
    (cold,) = calls(post, COLD_HIDDEN, 8, "cuda")
    (warmed,) = calls(post, HIDDEN, 8, "cuda")
    message = ""
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        try:
            with torch.cuda.graph(graph):
                cold()
        except CompileRefusedError as error:
            message = str(error)
        after = torch.cuda.CUDAGraph()
        with torch.cuda.graph(after):
            warmed()
        after.replay()
        torch.cuda.synchronize()
    return {"message": message, "refused": compiles.refused, "captures_afterwards": True}


class Model(torch.nn.Module):
    """One decoder layer's worth of operators, by the names that the gate reads of a layer."""

    def __init__(self, operators: dict[str, Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.hc_mult, self.layer.hidden_size, self.layer.hc_sinkhorn_iters = STREAMS, HIDDEN, 20
        self.layer.fuse_mhc_rmsnorm = True
        for name, operator in operators.items():
            self.layer.add_module(name, operator)


def loaded(operators: dict[str, Any]) -> dict[str, Any]:
    """A worker loads its model, with the gate in its place; what the gate saw, and how the load ended."""

    class Worker:
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

        def load_model(self) -> None:
            self.model_runner = SimpleNamespace(model=Model(operators), device="cuda")

    sections: dict[str, Any] = {}
    module: Any = SimpleNamespace(Worker=Worker)
    gate.patch(module, "refuse", lambda name, content: sections.update({name: content}), list).install()
    error = ""
    try:
        Worker().load_model()
    except gate.NumericsGateError as refused:
        error = str(refused)
    seen = sections[gate.SECTION]()
    worst = max(seen["rows"], key=lambda row: row["nrmse"] or 0.0)
    return {
        "state": seen["state"],
        "refused": error,
        "rows": len(seen["rows"]),
        "seconds": seen["seconds"],
        "largest_nrmse": {name: worst[name] for name in ("operator", "variant", "output", "tokens", "nrmse")},
        "unchecked": seen["unchecked"],
    }


def plant() -> None:
    """vLLM's kernel of pre with norm, whose layer input comes out sqrt(2) too large from here on."""
    module = upstream.kernels()
    kernel = module.mhc_pre_big_fuse_with_norm_tilelang

    def planted(*arguments: Any, **options: Any) -> Any:
        result = kernel(*arguments, **options)
        arguments[7].mul_(2**0.5)  # layer_input, bf16 [tokens, hidden]
        return result

    module.mhc_pre_big_fuse_with_norm_tilelang = planted


def child(case: str) -> dict[str, Any]:
    """One row. The cache folders are in the environment."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations, "no vllm on PYTHONPATH"
    major, _ = torch.cuda.get_device_capability()
    upstream.install(Path(spec.submodule_search_locations[0]).parent, "cuda", pdl=major >= 9)
    operators = {name: each for name, each in upstream.operators().items() if name in OPERATORS}
    compiles = Compiles("error")
    guarded(compiles)
    row = {"case": case, **warm(operators, compiles, 1 if case == "serial" else None)}
    if case == "parallel":
        row |= {"capture": captured(operators, compiles), "cold": refused_in_capture(operators, compiles)}
    if case == "gate":
        compiles.enter(Phase.WARMUP)
        row["right"] = loaded(operators)
        plant()
        row["planted"] = loaded(operators)
    return row


def main() -> None:
    """Run one process per row; a row that fails holds its last words."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    start.require(PROGRAM)
    if arguments.case:
        arguments.out.write_text(json.dumps(child(arguments.case)))
        return
    document: dict[str, Any] = {
        **start.heading(PROGRAM),
        "versions": {name: version(name) for name in ("torch", "tilelang", "vllm")},
        "geometry": {"hidden": HIDDEN, "streams": STREAMS, "tokens": list(TOKENS)},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            result = Path(folder) / f"{case}.json"
            cache = Path(folder) / ("serial" if case == "serial" else "parallel")
            environment = os.environ | {
                "TILELANG_CACHE_DIR": str(cache),
                "TRITON_CACHE_DIR": f"{cache}-triton",
            }
            command = [sys.executable, "-m", "bench.gpu.guard", "--out", str(result), "--case", case]
            row: dict[str, Any] = {"case": case}
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    stderr=subprocess.PIPE,
                    text=True,
                    timeout=CHILD_SECONDS,
                    check=False,
                )
                row = (
                    json.loads(result.read_text())
                    if result.exists()
                    else row | {"error": done.stderr[-3000:]}
                )
            except subprocess.TimeoutExpired:
                row["error"] = f"did not end within {CHILD_SECONDS} s"
            document["rows"].append(row)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
            print(json.dumps(row), flush=True)
    start.conclude(PROGRAM, sum("error" in row for row in document["rows"]))


if __name__ == "__main__":
    main()
