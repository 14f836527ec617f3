"""Compiles every mHC kernel that target and draft will ask for, before anything is captured or served.

Two means, one after the other, once the models are loaded and before memory is profiled:

1. Keys. The models' own forwards are run over every token count at which the dispatch may change its choice
   (`layer_pass`, `token_counts`), with TileLang's launches written down instead of made (`requests`). The
   keys found are compiled in parallel and put into the cache that a launch looks in. vLLM's own owners of
   kernels do not fill that cache on ROCm, and its registry never sees a draft.
2. Execution. The same forwards are run for real at the same token counts and at the capture sizes, which
   compiles what has no key to compile ahead: AITER's extension and the Triton kernels.

A model with mHC operators of which nothing was asked is an error. Not covered: attention and expert kernels,
pipeline parallelism, token counts above max_num_batched_tokens.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dspark_deploy.plugin.amd.compiles import Compiles
from dspark_deploy.plugin.amd.layer_pass import LayerPass, mhc_models, mhc_operators
from dspark_deploy.plugin.amd.requests import Request, recording
from dspark_deploy.plugin.amd.token_counts import token_counts

logger = logging.getLogger("vllm.dspark_deploy.warmup")
MOST_WORKERS = 8


class NothingToWarmError(RuntimeError):
    """The models hold mHC operators, and the warm-up found nothing that they would ask for."""


@dataclass(slots=True)
class Report:
    """What was warmed. `keys` are TileLang's, by model; `routes` says who served each operator, by model."""

    token_counts: list[int] = field(default_factory=list)
    keys: dict[str, list[str]] = field(default_factory=dict)
    routes: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    compiled: int = 0
    ask_seconds: float = 0.0
    compile_seconds: float = 0.0
    execute_seconds: float = 0.0
    skipped: str = ""

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def warm(
    models: dict[str, Any],
    max_tokens: int,
    capture_sizes: Iterable[int],
    compiles: Compiles,
    execute: bool = True,
    workers: int | None = None,
) -> Report:
    """Warm the mHC kernels of `models`, by name, `target` and `draft`.

    `max_tokens` is the largest token count of a step (max_num_batched_tokens), `capture_sizes` the token
    counts of graphs. `execute` is False only where there is no device to run on.

    Raises NothingToWarmError, and StructureError for a model that can't be passed through.
    """
    report = Report()
    passes = {
        f"{name}.{type(model).__name__}": LayerPass(model)
        for name, root in models.items()
        for model in mhc_models(root)
    }
    if not passes:
        _refuse_if_operators(models)
        report.skipped = "no model here has mHC operators"
        return report
    first = next(iter(passes.values()))
    started = time.perf_counter()
    # Once before counting: AITER and vLLM's kernel modules are loaded by their first call, and are read then.
    asked: dict[tuple[str, Any], Request] = {}
    for name, each in passes.items():
        _ask(name, each, [1], asked, report)
    report.token_counts = token_counts(max_tokens, capture_sizes, first.hidden, first.streams)
    for name, each in passes.items():
        _ask(name, each, report.token_counts, asked, report)
    report.ask_seconds = round(time.perf_counter() - started, 3)
    _refuse_if_empty(report, asked)
    started = time.perf_counter()
    report.compiled = compile_all(list(asked.values()), compiles, workers)
    report.compile_seconds = round(time.perf_counter() - started, 3)
    if execute:
        started = time.perf_counter()
        for each in passes.values():
            for tokens in report.token_counts:
                each.run(tokens)
        _release_memory()
        report.execute_seconds = round(time.perf_counter() - started, 3)
    logger.info(
        "dspark-deploy warm-up: %d TileLang keys, %d compiled, in %.1f s; %d token counts executed in %.1f s",
        len(asked),
        report.compiled,
        report.compile_seconds,
        len(report.token_counts),
        report.execute_seconds,
    )
    return report


def _ask(
    name: str, each: LayerPass, counts: list[int], asked: dict[tuple[str, Any], Request], report: Report
) -> None:
    with recording(each.operators) as recorded:
        for tokens in counts:
            recorded.tokens = tokens
            each.run(tokens)
    asked.update({key: request for key, request in recorded.requests.items() if key not in asked})
    keys = {f"{kernel}{key[0]}" for kernel, key in recorded.requests}
    report.keys[name] = sorted(keys | set(report.keys.get(name, [])))
    routes = report.routes.setdefault(name, {})
    for operator, providers in recorded.routes.items():
        routes[operator] = dict(Counter(routes.get(operator, {})) + providers)


def compile_all(requests: list[Request], compiles: Compiles, workers: int | None = None) -> int:
    """Compile what is not in its kernel's cache yet, and put it there. Returns how many were compiled.

    Building TIR is Python and stays in this thread; lowering and the device compiler run in `workers`.
    """
    missing = [request for request in requests if request.key not in request.jit._kernel_cache]
    if not missing:
        return 0
    tilelang_jit: Any = importlib.import_module("tilelang.jit")
    programs = [request.jit.get_tir(*request.args, **request.kwargs) for request in missing]

    def build(request: Request, program: Any) -> Any:
        jit = request.jit
        with compiles.watch("tilelang", request.kernel, str(request.key), request.tokens):
            return tilelang_jit.compile(
                program,
                out_idx=jit.out_idx,
                execution_backend=jit.execution_backend,
                target=jit.target,
                target_host=jit.target_host,
                verbose=jit.verbose,
                pass_configs=jit.pass_configs,
                compile_flags=jit.compile_flags,
            )

    threads = workers or min(MOST_WORKERS, len(missing), os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="dspark-deploy-warm-up") as pool:
        kernels = list(pool.map(build, missing, programs))
    for request, kernel in zip(missing, kernels, strict=True):
        request.jit._kernel_cache[request.key] = kernel
    return len(missing)


def _refuse_if_operators(models: dict[str, Any]) -> None:
    stray = [f"{name}.{path}" for name, root in models.items() for path in mhc_operators(root)]
    if stray:
        raise NothingToWarmError(
            f"dspark-deploy: mHC operators were found ({', '.join(stray[:4])}, ...), and no list of decoder "
            f"layers that calls them; this vLLM differs from what the warm-up was written for. Report it "
            f"with vLLM's version, and serve on without dspark-serve"
        )


def _refuse_if_empty(report: Report, asked: dict[tuple[str, Any], Request]) -> None:
    layers: Any = importlib.import_module("vllm.model_executor.layers.mhc")
    for name, routes in report.routes.items():
        if not routes:
            raise NothingToWarmError(f"dspark-deploy: {name} called none of its mHC operators in the warm-up")
    only_tilelang = getattr(layers, "HAS_TILELANG_MHC", False) and not getattr(layers, "HAS_AITER_MHC", False)
    if only_tilelang and not asked:
        raise NothingToWarmError(
            "dspark-deploy: mHC is on TileLang here, and the warm-up found no TileLang key; is TileLang's "
            "JITImpl another than the one that vLLM's kernels are made of?"
        )


def _release_memory() -> None:
    """Give the pass's memory back before vLLM profiles; the warm-up is to leave no trace in that figure."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
