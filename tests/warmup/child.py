"""One SIMULATED worker in a process of its own; prints what was seen as one JSON document.

    python -m tests.warmup.child '{"arch": "gfx950", "aiter": false, "settings": FILE, ...}'

`case` chooses what is done after the plugin's hook has run, as vLLM would run it:

    closure    build target and draft of each family, warm, then run both at every token count
    native     the reference arm: the draft's forward with the patched tail, against the unpatched function
    tail       the keys that the draft's tail alone asks for
    states     load the drafts' modules, and nothing more
    lowering   compile two kernels for real up to HIP source, with the device compiler stubbed
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.warmup import simulated_rocm as simulated


def main() -> None:
    """Run the case that the argument names."""
    asked = json.loads(sys.argv[1])
    simulated.start(asked["arch"], asked["aiter"])
    if asked.get("edit"):
        _edit_source(asked["edit"], Path(asked["folder"]))
    import dspark_deploy.plugin as plugin

    if not asked.get("without_plugin"):
        plugin.general_hook()
    _take_out(asked.get("without", []))
    cases = {"closure": _closure, "native": _native, "lowering": _lowering, "tail": _tail, "states": _states}
    document = cases[asked["case"]](asked)
    from dspark_deploy.plugin import process

    document["patches"] = {r.name: {"state": r.state, "detail": r.detail} for r in process._registry.records}
    document["milliseconds"] = process._milliseconds
    import vllm

    document["vllm"], document["simulated"] = vllm.__version__, True
    sys.stdout.write("\nRESULT " + json.dumps(document) + "\n")


def _take_out(names: list[str]) -> None:
    """Forget the watch for a module, as if its patch had not been written."""
    from dspark_deploy.plugin.when_loaded import _finder

    for name in names:
        _finder.waiting.pop(name, None)


def _edit_source(edit: dict[str, str], folder: Path) -> None:
    """Serve one of vLLM's modules from an edited source: another vLLM than the patch was written for."""
    import importlib.machinery
    import importlib.util

    name = edit["module"]

    class Finder:
        def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
            if fullname != name:
                return None
            found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            assert found is not None and found.origin is not None
            source = Path(found.origin).read_text()
            assert edit["old"] in source, f"{name}: nothing to edit"
            copy = folder / Path(found.origin).name  # a file, since `inspect.getsource` reads it
            copy.write_text(source.replace(edit["old"], edit["new"]))
            loader = importlib.machinery.SourceFileLoader(fullname, str(copy))
            return importlib.util.spec_from_file_location(fullname, copy, loader=loader)

    sys.meta_path.insert(0, Finder())


def _stub_kernels() -> set[tuple[str, Any]]:
    """TileLang parses calls into keys as ever; what it compiles does nothing. Returns the keys asked for."""
    tilelang_jit: Any = importlib.import_module("tilelang.jit")
    tilelang_jit.compile = lambda *_a, **_k: lambda *_tensors: None
    tilelang_jit.JITImpl.get_tir = lambda *_a, **_k: None
    asked: set[tuple[str, Any]] = set()
    call = tilelang_jit.JITImpl.__call__
    from dspark_deploy.plugin.amd.capture_guard import kernel_name, tilelang_key

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.add((kernel_name(self), tilelang_key(self, args, kwargs)))
        return call(self, *args, **kwargs)

    tilelang_jit.JITImpl.__call__ = ask
    return asked


def _closure(asked: dict[str, Any]) -> dict[str, Any]:
    from dspark_deploy.plugin.amd.compiles import Phase, process_compiles
    from dspark_deploy.plugin.amd.warmup import warm

    requested = _stub_kernels()
    families: dict[str, Any] = {}
    for family in filter(simulated.has_family, asked["families"]):
        for hidden, max_tokens in asked["hidden"]:
            models = simulated.Models(family, hidden, "meta", max_tokens)
            process_compiles.phase = Phase.WARMUP
            before = len(process_compiles.records)
            started = time.perf_counter()
            report = warm(
                {"target": models.target, "draft": models.draft}, max_tokens, [6, 12, 24], process_compiles
            )
            seconds = time.perf_counter() - started
            if asked.get("forget_key"):
                _forget(asked["forget_key"])
            process_compiles.phase = Phase.SERVING
            asked_for: dict[str, set[str]] = {}
            started = time.perf_counter()
            for name in ("target", "draft"):
                requested.clear()
                for tokens in range(1, max_tokens + 1):
                    models.run(tokens, name)
                asked_for[name] = {f"{kernel}{key[0]}" for kernel, key in requested}
            records = process_compiles.records[before:]
            families[f"{family} {hidden}"] = {
                "max_tokens": max_tokens,
                "warmed": sorted({key for keys in report.keys.values() for key in keys}),
                "warmed_by_model": report.keys,
                "routes": report.routes,
                "token_counts": report.token_counts,
                "asked": {name: sorted(keys) for name, keys in asked_for.items()},
                "serving_compiles": [
                    [r.kernel, r.key, r.tokens] for r in records if r.phase is Phase.SERVING
                ],
                "warm_compiles": sum(r.phase is Phase.WARMUP for r in records),
                "warm_seconds": round(seconds, 2),
                "sweep_seconds": round(time.perf_counter() - started, 2),
            }
            process_compiles.records.clear()
    from dspark_deploy.plugin.amd.token_counts import dispatch_constants

    constants = sorted(dispatch_constants())
    return {"families": families, "constants": constants, "flags": _flags(), "runner": _load_runner(asked)}


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
    import gc

    implementation = importlib.import_module("tilelang.jit").JITImpl
    for each in gc.get_objects():
        if isinstance(each, implementation) and each.func.orig_func.__name__ == kernel:
            each._kernel_cache.clear()


def _native(asked: dict[str, Any]) -> dict[str, Any]:
    """Real numbers on the CPU: no kernel is stubbed, since none is asked for."""
    import torch

    results: dict[str, Any] = {}
    for family in filter(simulated.has_family, asked["families"]):
        torch.manual_seed(0)
        models = simulated.Models(family, 1024, "cpu", 64)
        draft, ids = models.draft, torch.arange(5)
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
    return {"native": results, "flags": _flags()}


def _tail(asked: dict[str, Any]) -> dict[str, Any]:
    """Call the name that the draft's forward calls, on tensors of its shapes, after a draft was built."""
    import torch

    requested = _stub_kernels()
    models = simulated.Models("deepseek_v41", 5120, "meta", 64)
    x = torch.zeros(5, 5120, dtype=torch.bfloat16, device="meta")
    streams = torch.zeros(5, 4, 5120, dtype=torch.bfloat16, device="meta")
    requested.clear()
    with torch.inference_mode():
        models.draft_module.mhc_post_torch(
            x, streams, torch.zeros(5, 4, 1, device="meta"), torch.zeros(5, 4, 4, device="meta")
        )
    return {"tail": {"keys": sorted(f"{kernel}{key[0]}" for kernel, key in requested)}}


def _states(asked: dict[str, Any]) -> dict[str, Any]:
    for family in filter(simulated.has_family, asked["families"]):
        importlib.import_module(f"vllm.models.{family}.amd.dspark")
    return {}


def _lowering(asked: dict[str, Any]) -> dict[str, Any]:
    """TileLang's own lowering. The device compiler is a stub, so nothing here can be launched."""
    from dspark_deploy.plugin.amd.compiles import Phase, process_compiles
    from dspark_deploy.plugin.amd.layer_pass import LayerPass
    from dspark_deploy.plugin.amd.requests import recording
    from dspark_deploy.plugin.amd.warmup import compile_all

    sources = simulated.stub_device_compiler()
    models = simulated.Models("deepseek_v4", asked["hidden"], "meta", 64)
    draft = LayerPass(models.draft)
    with recording(draft.operators) as recorded:
        draft.run(40)
    chosen = [r for r in recorded.requests.values() if r.kernel in asked["kernels"]]
    process_compiles.phase = Phase.WARMUP
    started = time.perf_counter()
    compiled = compile_all(chosen, process_compiles, asked.get("workers"))
    seconds = time.perf_counter() - started
    process_compiles.guard, process_compiles.phase = "error", Phase.SERVING
    return {
        "compiled": compiled,
        "seconds": round(seconds, 2),
        "sources": sources,
        "in_runtime_cache": {r.kernel: r.key in r.jit._kernel_cache for r in chosen},
        "compiles": process_compiles.as_json(),
    }


if __name__ == "__main__":
    main()
