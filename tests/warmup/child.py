"""A SIMULATED worker: vLLM's imports once per vLLM and architecture, then a process of its own for each case.

    python -m tests.warmup.child gfx950 tilelang        one request a line on stdin, until it is closed

A request is a JSON object `{"case": ..., "folder": FOLDER, "environment": {...}, ...}`. A fork answers it:
stdout and stderr go to FOLDER, what was seen to FOLDER/seen.json, and when it has ended FOLDER/exit holds its
exit code. Nothing that the plugin patches is imported before a fork, so each case sees what a vLLM process
sees. `case` chooses what is done after the plugin's hook has run, as vLLM would run it:

    closure    build target and draft of each family, warm, then run both at every token count
    native     the reference arm: the draft's forward with the patched tail, against the unpatched function
    guard      compile while serving and in capture: TileLang's, by the draft's tail, Triton's, AITER's
    edited     examine edited copies of vLLM's draft module
    states     load the drafts' modules, and nothing more
    lowering   compile two kernels for real up to HIP source, with the device compiler stubbed
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import select
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.warmup import simulated_rocm as simulated

# What every case imports and no patch looks at; without it a case begins some 16 processor seconds later.
PRELOADED = ("vllm.config", "vllm.distributed", "fastapi", "grpc", "xgrammar", "compressed_tensors")


def main() -> None:
    """Import, then fork for each request."""
    simulated.start(sys.argv[1], sys.argv[2] == "aiter")
    for name in PRELOADED:
        importlib.import_module(name)
    # A fork's collector would look through all of this again, at the expense of whatever is timed there.
    gc.collect()
    gc.freeze()
    running: dict[int, Path] = {}
    pending = b""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.1)
        if readable:
            chunk = os.read(sys.stdin.fileno(), 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _answer(asked)
                running[pid] = Path(asked["folder"])
        while running and (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            (running.pop(ended[0]) / "exit").write_text(str(os.waitstatus_to_exitcode(ended[1])))


def _answer(asked: dict[str, Any]) -> None:
    """One case, in the fork, which ends here."""
    folder = Path(asked["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
    os.environ.update(asked["environment"])
    code = 1
    try:
        document = _seen(asked)
        (folder / "seen.json").write_text(json.dumps(document))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # A fork must not go on into its parent's loop, whatever was raised.
        os._exit(code)


def _seen(asked: dict[str, Any]) -> dict[str, Any]:
    import dspark_deploy.plugin as plugin

    _take_out(asked.get("without", []))
    plugin.general_hook()
    cases = {
        "closure": _closure,
        "native": _native,
        "lowering": _lowering,
        "guard": _guard,
        "states": _states,
        "edited": _edited,
    }
    document = cases[asked["case"]](asked)
    from dspark_deploy.plugin import process

    document["patches"] = {r.name: {"state": r.state, "detail": r.detail} for r in process._registry.records}
    document["milliseconds"] = process._milliseconds
    import vllm

    document["vllm"], document["simulated"] = vllm.__version__, True
    return document


def _take_out(names: list[str]) -> None:
    """Watch for these modules no more, as if their patches had not been written."""
    from dspark_deploy.plugin.amd import modules

    makers = modules.makers
    modules.makers = lambda *args: {k: make for k, make in makers(*args).items() if k not in names}


def _stub_kernels() -> set[tuple[str, Any]]:
    """TileLang parses calls into keys as ever; what it compiles does nothing. Returns the keys asked for."""
    tilelang_jit: Any = importlib.import_module("tilelang.jit")
    tilelang_jit.compile = lambda *_a, **_k: lambda *_tensors: None
    tilelang_jit.JITImpl.get_tir = lambda *_a, **_k: None
    asked: set[tuple[str, Any]] = set()
    call = tilelang_jit.JITImpl.__call__
    from dspark_deploy.plugin.amd.capture_guard import kernel_name, tilelang_key

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = tilelang_key(self, args, kwargs)
        asked.add((kernel_name(self), key))
        # A hit would launch a stub; only a miss goes on, to TileLang's own lookup and compile.
        return None if key in self._kernel_cache else call(self, *args, **kwargs)

    tilelang_jit.JITImpl.__call__ = ask
    return asked


def _closure(asked: dict[str, Any]) -> dict[str, Any]:
    from dspark_deploy.plugin.amd.compiles import Phase, process_compiles
    from dspark_deploy.plugin.amd.warmup import Report, warm

    requested = _stub_kernels()
    families: dict[str, Any] = {}
    for family in filter(simulated.has_family, asked["families"]):
        for hidden in asked["hidden"]:
            max_tokens = asked["max_tokens"]
            models = simulated.Models(family, hidden, "meta", max_tokens)
            process_compiles.phase = Phase.WARMUP
            before = len(process_compiles.records)
            started = time.perf_counter()
            loaded = {"target": models.target, "draft": models.draft}
            report = Report()
            if not asked.get("skip_warm_up"):
                report = warm(loaded, max_tokens, [6, 12, 24], process_compiles)
            seconds = time.perf_counter() - started
            if asked.get("forget_key"):
                _forget(asked["forget_key"])
            process_compiles.phase = Phase.SERVING
            asked_for: dict[str, set[str]] = {}
            started = time.perf_counter()
            for name in ("target", "draft"):
                requested.clear()
                for tokens in _swept(asked["every_up_to"], max_tokens):
                    models.run(tokens, name)
                asked_for[name] = {f"{kernel}{key[0]}" for kernel, key in requested}
            records = process_compiles.records[before:]
            families[f"{family} {hidden}"] = {
                "max_tokens": max_tokens,
                "warmed": sorted({key for keys in report.keys.values() for key in keys}),
                "warmed_by_model": report.keys,
                "routes": report.routes,
                "token_counts": report.token_counts,
                "swept": len(_swept(asked["every_up_to"], max_tokens)),
                "asked": {name: sorted(keys) for name, keys in asked_for.items()},
                "serving_compiles": [
                    [r.kernel, r.key, r.tokens] for r in records if r.phase is Phase.SERVING
                ],
                "warm_compiles": sum(r.phase is Phase.WARMUP for r in records),
                "warm_seconds": round(seconds, 2),
                "sweep_seconds": round(time.perf_counter() - started, 2),
            }
            process_compiles.records.clear()
    return {"families": families, "flags": _flags(), "runner": _load_runner(asked)}


def _swept(every_up_to: int, max_tokens: int) -> list[int]:
    """Every token count up to the first limit, and around each larger constant of the dispatch code."""
    from dspark_deploy.plugin.amd.token_counts import dispatch_constants

    counts = {*range(1, min(every_up_to, max_tokens) + 1), max_tokens}
    for constant in dispatch_constants():
        counts |= {constant - 1, constant, constant + 1}
    return sorted(count for count in counts if 1 <= count <= max_tokens)


def _flags() -> dict[str, bool]:
    from dspark_deploy.plugin.amd.provider import LAYERS, flags

    return flags(importlib.import_module(LAYERS))


def _load_runner(asked: dict[str, Any]) -> bool:
    """Load the worker's modules, so that their patches are examined on this vLLM's real source."""
    if asked.get("runner"):
        importlib.import_module("vllm.v1.worker.gpu.model_runner")
        importlib.import_module("vllm.v1.worker.gpu_worker")
    return bool(asked.get("runner"))


def _forget(kernel: str) -> None:
    """Empty one kernel's cache: a warm-up that has missed a key."""
    implementation = importlib.import_module("tilelang.jit").JITImpl
    for each in gc.get_objects():
        if isinstance(each, implementation) and each.func.orig_func.__name__ == kernel:
            each._kernel_cache.clear()


def _native(asked: dict[str, Any]) -> dict[str, Any]:
    """Real numbers on the CPU: no kernel is stubbed, since none is asked for."""
    import torch

    from dspark_deploy.plugin.amd.compiles import process_compiles
    from dspark_deploy.plugin.amd.warmup import warm

    results: dict[str, Any] = {}
    routes: dict[str, Any] = {}
    for family in filter(simulated.has_family, asked["families"]):
        torch.manual_seed(0)
        models = simulated.Models(family, 1024, "cpu", 64)
        draft, ids = models.draft, torch.arange(5)
        report = warm(
            {"target": models.target, "draft": models.draft}, 64, [], process_compiles, execute=True
        )
        routes |= {f"{family}.{name}": found for name, found in report.routes.items()}
        embeds = torch.randn(5, 1024).bfloat16()
        with torch.inference_mode():
            patched = draft(ids, ids, embeds)
            result = {"finite": bool(patched.float().isfinite().all()), "shape": list(patched.shape)}
            if hasattr(models.draft_module, "mhc_post_torch"):
                from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

                ours = models.draft_module.mhc_post_torch
                models.draft_module.mhc_post_torch = mhc_post_torch
                result["rebound"] = ours is not mhc_post_torch
                result["equal"] = bool(torch.equal(patched, draft(ids, ids, embeds)))
        results[family] = result
    return {"native": results, "routes": routes, "flags": _flags()}


def _guard(asked: dict[str, Any]) -> dict[str, Any]:
    """What each library's compile meets in each phase; None where it was let through."""
    from dspark_deploy.plugin.amd.compiles import CompileRefusedError, Phase, process_compiles

    requested = _stub_kernels()
    compiles_ = {"tilelang": _tail(requested), "triton": _triton_kernel(asked), "aiter": _aiter_module(asked)}
    refused: dict[str, dict[str, str | None]] = {}
    tail: list[str] = []
    for phase in (Phase.CAPTURE, Phase.SERVING):
        process_compiles.phase = phase
        refused[phase] = {}
        for library, compile_ in compiles_.items():
            refused[phase][library] = None
            requested.clear()
            try:
                compile_()
            except CompileRefusedError as error:
                refused[phase][library] = str(error)
            if library == "tilelang":
                tail = sorted(f"{kernel}{key[0]}" for kernel, key in requested)
        _forget("mhc_post_tilelang")
    return {"refused": refused, "tail": tail, "compiles": process_compiles.as_json()}


def _tail(requested: set[tuple[str, Any]]) -> Any:
    """A call of what the draft's forward calls for its tail, on 5 tokens; of the operator before V4.1."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.mhc import MHCPostOp

    family = next(f for f in reversed(simulated.FAMILIES) if simulated.has_family(f))
    models = simulated.Models(family, 5120, "meta", 64)
    with set_current_vllm_config(models.vllm_config):
        tail = getattr(models.draft_module, "mhc_post_torch", None) or MHCPostOp()
    x = torch.zeros(5, 5120, dtype=torch.bfloat16, device="meta")
    streams = torch.zeros(5, 4, 5120, dtype=torch.bfloat16, device="meta")
    mixes = torch.zeros(5, 4, 1, device="meta"), torch.zeros(5, 4, 4, device="meta")

    def call() -> None:
        with torch.inference_mode():
            tail(x, streams, *mixes)

    return call


def _triton_kernel(asked: dict[str, Any]) -> Any:
    """What Triton does on a miss: its hook, then a compile for the architecture, which needs no GPU."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    def copy(source, target, block: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.arange(0, block)
        tl.store(target + offsets, tl.load(source + offsets))

    kernel = JITFunction(copy)
    types = {"source": "*fp32", "target": "*fp32", "block": "constexpr"}
    program = triton.compiler.ASTSource(kernel, types, constexprs={(2,): 64})

    def call() -> None:
        hook = triton.knobs.runtime.jit_cache_hook
        if hook is not None:
            hook(
                key="copy-64",
                fn=SimpleNamespace(name="copy"),
                compile={"key": "copy-64"},
                already_compiled=False,
            )
        triton.compile(program, target=GPUTarget("hip", asked["arch"], 64))

    return call


def _aiter_module(asked: dict[str, Any]) -> Any:
    """A module with the name and the signature of AITER's builder, which builds nothing."""
    folder = Path(asked["folder"]) / "aiter" / "jit"
    folder.mkdir(parents=True, exist_ok=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").write_text("")
    (folder / "core.py").write_text("def build_module(md_name, srcs, flags_extra_cc):\n    return md_name\n")
    sys.path.insert(0, asked["folder"])
    core = importlib.import_module("aiter.jit.core")
    return lambda: core.build_module("module_mhc", [], [])


def _edited(asked: dict[str, Any]) -> dict[str, Any]:
    """Load copies of a module under names beside its own, and examine each."""
    import importlib.util

    from dspark_deploy.plugin.amd import fused_post

    original = importlib.import_module(asked["module"])
    source = Path(str(original.__file__)).read_text()
    verdicts = {}
    for number, (name, (old, new)) in enumerate(asked["edits"].items()):
        assert old in source, f"{asked['module']}: nothing to edit"
        # A file, since the examination reads a function's source from it.
        file = Path(asked["folder"]) / f"edited_{number}.py"
        file.write_text(source.replace(old, new).replace("direct_register_custom_op(", "print("))
        spec = importlib.util.spec_from_file_location(f"{asked['module']}_{number}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        verdict = fused_post.examine(module)
        verdicts[name] = {"state": verdict.state, "reason": verdict.reason}
    return {"verdicts": verdicts}


def _states(asked: dict[str, Any]) -> dict[str, Any]:
    for family in filter(simulated.has_family, asked["families"]):
        importlib.import_module(f"vllm.models.{family}.amd.dspark")
    return {"flags": _flags()}


def _lowering(asked: dict[str, Any]) -> dict[str, Any]:
    """TileLang's own lowering. The device compiler is a stub, so nothing here can be launched."""
    from dspark_deploy.plugin.amd.compiles import Phase, process_compiles
    from dspark_deploy.plugin.amd.layer_pass import LayerPass
    from dspark_deploy.plugin.amd.requests import recording
    from dspark_deploy.plugin.amd.warmup import compile_all

    sources = simulated.stub_device_compiler()
    models = simulated.Models(asked.get("family", "deepseek_v4"), asked["hidden"], "meta", 8192)
    draft = LayerPass(models.draft)
    with recording(draft.operators) as recorded:
        for recorded.tokens in asked.get("counts", [40]):
            draft.run(recorded.tokens)
    chosen = [
        r for r in recorded.requests.values() if asked["kernels"] == "all" or r.kernel in asked["kernels"]
    ]
    process_compiles.phase = Phase.WARMUP
    started = time.perf_counter()
    compiled = compile_all(chosen, process_compiles, asked.get("workers"))
    seconds = time.perf_counter() - started
    process_compiles.phase = Phase.SERVING
    cold = 0
    for request in chosen:
        found = request.jit._kernel_cache.get(request.key)
        cold += found is None
    return {
        "cold_launches": cold,
        "folder": asked["folder"],
        "cache_folder": os.environ["TILELANG_CACHE_DIR"],
        "triton_folder": os.environ["TRITON_CACHE_DIR"],
        "compiled": compiled,
        "seconds": round(seconds, 2),
        "sources": sources,
        "in_runtime_cache": {r.kernel: r.key in r.jit._kernel_cache for r in chosen},
        "compiles": process_compiles.as_json(),
    }


if __name__ == "__main__":
    main()
