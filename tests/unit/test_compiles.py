"""The capture guard's bookkeeping: phases, refusals, counts; the log it leaves, and jit-log reading it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_deploy.errors import InputError
from dspark_deploy.launch.kernels import compile_counts, kernel_lines
from dspark_deploy.launch.prewarm import cache_bytes, prewarm_document
from dspark_deploy.plugin.amd.capture_guard import token_count
from dspark_deploy.plugin.amd.compiles import CompileRefusedError, Compiles, Phase
from tuning.jit_log import classify, read_log

KEY = "((4, 5120, 128, 1024), ())"


def compile_one(
    compiles: Compiles, phase: Phase, kernel: str = "mhc_post_tilelang", source: str = "compiled"
) -> None:
    compiles.enter(phase)
    with compiles.watch("tilelang", kernel, KEY, 5) as record:
        record.source = source


@pytest.mark.parametrize("phase", [Phase.CAPTURE, Phase.SERVING])
def test_error_refuses_in_capture_and_after_readiness(phase: Phase) -> None:
    compiles = Compiles("error")
    with pytest.raises(CompileRefusedError) as refusal:
        compile_one(compiles, phase)
    for part in ("mhc_post_tilelang", KEY, "5 tokens", "jit.guard=warn"):
        assert part in str(refusal.value)
    assert compiles.as_json()["refused"] == 1 and compiles.records == []


@pytest.mark.parametrize("phase", [Phase.LOAD, Phase.WARMUP])
def test_error_lets_compile_before(phase: Phase) -> None:
    compiles = Compiles("error")
    compile_one(compiles, phase)
    assert compiles.as_json()["compiled"][str(phase)] == 1


def test_warn_logs_once_a_key(caplog: pytest.LogCaptureFixture) -> None:
    compiles = Compiles("warn")
    with caplog.at_level(logging.WARNING, logger="vllm.dspark_deploy.jit"):
        for _ in range(3):
            compile_one(compiles, Phase.SERVING)
        compile_one(compiles, Phase.SERVING, "mhc_fused_tilelang")
    assert [record.args[0].split()[3] for record in caplog.records] == [  # type: ignore[index, union-attr]
        "kernel=mhc_post_tilelang",
        "kernel=mhc_fused_tilelang",
    ]
    assert compiles.as_json()["compiled"]["serving"] == 4


def test_loads_from_disk_are_counted_apart() -> None:
    compiles = Compiles("warn")
    compile_one(compiles, Phase.WARMUP, source="disk")
    report = compiles.as_json()
    assert report["from_disk"]["warm-up"] == 1 and report["compiled"]["warm-up"] == 0


def test_a_compile_that_fails_is_not_counted() -> None:
    compiles = Compiles("warn")
    with pytest.raises(ValueError, match="hipcc"), compiles.watch("tilelang", "k", KEY, 1):
        raise ValueError("hipcc: not found")
    assert compiles.records == [] and compiles.current is None


def test_token_count_is_that_of_the_activations() -> None:
    def tensor(dtype: str, *shape: int) -> Any:
        return SimpleNamespace(dtype=f"torch.{dtype}", shape=shape)

    weights = [tensor("float32", 24, 4), tensor("bfloat16", 5120)]
    assert token_count([*weights, tensor("bfloat16", 7, 4, 5120), tensor("bfloat16", 9, 1)]) == 7
    assert token_count(weights) == 0


def test_jit_log_reads_what_the_guard_wrote(caplog: pytest.LogCaptureFixture) -> None:
    compiles = Compiles("warn")
    with caplog.at_level(logging.INFO, logger="vllm.dspark_deploy.jit"):
        compile_one(compiles, Phase.WARMUP)
        compile_one(compiles, Phase.WARMUP, source="disk")
        compile_one(compiles, Phase.CAPTURE, "mhc_fused_tilelang")
        compile_one(compiles, Phase.SERVING, "hc_head_fuse_tilelang")
        compiles.guard = "error"
        with pytest.raises(CompileRefusedError):
            compile_one(compiles, Phase.SERVING, "refused_one")
    lines = [f"(Worker pid=1) INFO 12-02 [jit.py:1] {record.getMessage()}" for record in caplog.records]
    lines += ["(Worker pid=1) TileLang begins to compile kernel `counted_by_the_guard`"]
    log = classify(lines)
    counts = {phase: dict(found) for phase, found in log.compiles.items()}
    assert counts == {
        "load": {},
        "warm-up": {"tilelang": 1},
        "capture": {"tilelang": 1},
        "serving": {"tilelang": 1},
    }
    assert (log.from_disk, log.refused, log.guarded) == (1, 1, True)
    assert [(m["phase"], m["kernel"], m["key"], m["tokens"]) for m in log.missing] == [
        ("capture", "mhc_fused_tilelang", KEY, 5),
        ("serving", "hc_head_fuse_tilelang", KEY, 5),
        ("serving", "refused_one", KEY, 5),
    ]


def test_jit_log_without_the_guard_goes_by_vllms_own_lines() -> None:
    log = classify(
        [
            "TileLang begins to compile kernel `at_load`",
            "Model loading took 1.0 GiB memory",
            "[aiter] start build [module_mhc] under /x/build/module_mhc",
            "[aiter] waiting for baton release at /x/build/lock_module_mhc",
            "Capturing CUDA graphs (FULL)",
            "TileLang begins to compile kernel `in_capture`",
            "Graph capturing finished in 3 secs",
            "Application startup complete.",
            "WARNING Triton kernel JIT compilation during inference: _late_kernel. This causes a",
        ]
    )
    assert {phase: dict(found) for phase, found in log.compiles.items()} == {
        "load": {"tilelang": 1},
        "warm-up": {"aiter": 1},
        "capture": {"tilelang": 1},
        "serving": {"triton": 1},
    }
    assert dict(log.locks) == {"lock_module_mhc": 1}
    assert [m["kernel"] for m in log.missing] == ["in_capture", "_late_kernel"] and not log.guarded


def test_jit_log_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.log"):
        read_log(tmp_path / "gone.log")


def process(pid: int) -> dict[str, Any]:
    compiles = Compiles("warn")
    compile_one(compiles, Phase.WARMUP)
    mhc = {
        "skipped": "",
        "keys": {"target.M": ["a", "b"], "draft.M": ["b"]},
        "compiled": 2,
        "compile_seconds": 1.0,
        "token_counts": [1, 2],
        "execute_seconds": 0.5,
        "routes": {"draft.M": {"MHCPostOp": {"tilelang": 3}}},
    }
    return {"pid": pid, "compiles": compiles.as_json(), "mhc": mhc}


def test_compiles_of_all_processes_are_shown_by_phase() -> None:
    reports = [process(1), process(2), {"pid": 3}]
    assert compile_counts(reports)["compiled"] == {"load": 0, "warm-up": 2, "capture": 0, "serving": 0}
    lines = kernel_lines(reports)
    assert "kernels compiled: load 0, warm-up 2, capture 0, serving 0" in lines
    assert lines.count("draft.M MHCPostOp: tilelang") == 1, "ranks that are alike share a line"
    assert kernel_lines([{"pid": 3}]) == []


def test_prewarm_reports_keys_seconds_and_bytes(tmp_path: Path) -> None:
    env = {
        "TILELANG_CACHE_DIR": str(tmp_path / "t"),
        "TRITON_CACHE_DIR": str(tmp_path),
        "AITER_JIT_DIR": "/no",
    }
    before = cache_bytes(env)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "kernel.so").write_bytes(b"12345")
    document = prewarm_document("rocm", [process(1)], 12.5, before, cache_bytes(env))
    assert document["keys"] == ["a", "b"] and document["seconds"] == 12.5
    assert document["bytes"] == {"tilelang": 5, "triton": 5, "aiter": 0} and document["compiled"] == 1
    json.dumps(document)
