"""`dspark-serve --prewarm` around an engine that is a stand-in: started, waited for, stopped, reported."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspark_deploy.errors import InputError, MeasurementError
from dspark_deploy.launch import prewarm
from dspark_deploy.launch.engine import ReadyReport
from dspark_deploy.plugin.amd.compiles import Compiles, Phase
from dspark_deploy.plugin.amd.warmup import Report
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load

ROCM = TEXT.replace("{platform: cpu}", "{platform: rocm, arch: gfx950, gpus: 1}").replace(
    "  port: 8123\n", "  port: 8123\n  env: {TILELANG_CACHE_DIR: tilelang-cache}\n"
)


def worker(compiled: int = 1, **changes: Any) -> dict[str, Any]:
    """A worker's report, as the plugin writes it on ROCm; `changes` are of its warm-up."""
    compiles = Compiles()
    compiles.enter(Phase.WARMUP)
    for number in range(compiled):
        with compiles.watch("tilelang", "mhc_post_tilelang", f"((4, {number}), ())", 5) as record:
            record.source = "compiled"
    routes = {"target.M": {"MHCPostOp": {"tilelang": 3}}}
    mhc = asdict(Report(keys={"target.M": ["mhc_post_tilelang(4, 5120)"]}, routes=routes))
    return {"pid": 7, "numerics": {}, "compiles": compiles.as_json(), "mhc": mhc | changes}


class StandIn:
    """An engine that compiles one kernel into the cache while it starts. It reports all but `lacks`."""

    stopped = False
    lacks: tuple[str, ...] = ()

    @classmethod
    def start(cls, *_arguments: Any) -> StandIn:
        cls.stopped = False
        return cls()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_error: Any) -> None:
        StandIn.stopped = True

    def wait_ready(self, _echo: Any) -> ReadyReport:
        Path("tilelang-cache").mkdir(exist_ok=True)
        Path("tilelang-cache/kernel.so").write_bytes(b"1234567")
        process = {name: part for name, part in worker().items() if name not in self.lacks}
        return ReadyReport("http://x", 40.0, [process])


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prewarm, "Engine", StandIn)
    monkeypatch.setattr(StandIn, "lacks", ())
    monkeypatch.setenv("HOME", str(tmp_path))
    return Console(record=True, width=140)


def test_keys_seconds_and_bytes_are_reported(tmp_path: Path, console: Console, capsys: Any) -> None:
    prewarm.run_prewarm(console, load(tmp_path, ROCM), good_facts(), [], tmp_path / "runs", True, True)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["status"] == "prewarmed" and document["seconds"] == 40.0 and document["compiled"] == 1
    assert document["bytes"]["tilelang"] == 7
    assert StandIn.stopped
    assert json.loads((Path(document["run_directory"]) / "prewarm.json").read_text())["compiled"] == 1
    assert "kernels compiled: load 0, warm-up 1" in console.export_text()


def test_without_a_guard_there_is_nothing_to_report(tmp_path: Path, console: Console) -> None:
    with pytest.raises(InputError, match=r"jit\.guard=warn"):
        loaded = load(tmp_path, ROCM + "jit: {guard: 'off'}\n")
        prewarm.run_prewarm(console, loaded, good_facts(), [], tmp_path / "runs", True, False)


def test_on_cuda_nothing_is_counted_and_no_number_is_given(
    tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "lacks", ("compiles", "mhc"))
    loaded = load(tmp_path, ROCM.replace("platform: rocm, arch: gfx950", "platform: cuda"))
    prewarm.run_prewarm(console, loaded, good_facts(), [], tmp_path / "runs", True, True)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["status"] == "not counted" and document["bytes"]["tilelang"] == 7
    assert not {"keys", "compiles", "compiled"} & document.keys()
    assert "compiles are not counted on this platform" in console.export_text()


@pytest.mark.parametrize(("lacks", "names"), [("compiles", "its compiles"), ("mhc", "a warm-up")])
def test_a_start_that_reports_nothing_is_a_failure(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch, lacks: str, names: str
) -> None:
    monkeypatch.setattr(StandIn, "lacks", (lacks,))
    with pytest.raises(MeasurementError, match=f"process 7 did not report {names}"):
        prewarm.run_prewarm(console, load(tmp_path, ROCM), good_facts(), [], tmp_path / "runs", True, False)
    (written,) = (tmp_path / "runs").glob("*/prewarm.json")
    assert json.loads(written.read_text())["status"] == "failed"
    assert StandIn.stopped and "ready after" not in console.export_text()


AITER = {"target.M": {"MHCPostOp": {"aiter": 3}}}


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        ([], "no process reported its compiles"),
        ([{"pid": 1}], "no process reported its compiles"),
        ([worker(), {"pid": 8, "numerics": {}}], "process 8 did not report its compiles"),
        ([worker(keys={})], "zero keys were found, and 1 kernels compiled"),
        ([worker(keys={"target.M": []}, routes={})], "served by nothing"),
        ([worker(0, keys={}, routes=AITER)], "zero keys were found, and 0 kernels"),
        ([worker(1, keys={}, routes=AITER)], None),
        ([worker(skipped="pipeline parallelism (2 stages)")], "skipped: pipeline parallelism"),
        ([worker(0), {"pid": 1, "compiles": Compiles().as_json()}], None),
    ],
)
def test_what_shows_no_warm_up_fails_without_a_number(
    processes: list[dict[str, Any]], reason: str | None
) -> None:
    document = prewarm.prewarm_document("rocm", processes, 1.0, {"aiter": 1}, {"aiter": 3})
    if reason is None:
        assert document["status"] == "prewarmed" and "reason" not in document
    else:
        assert document["status"] == "failed" and reason in document["reason"]
        assert not {"keys", "compiles", "compiled"} & document.keys()


@pytest.mark.parametrize("variable", ["TILELANG_CACHE_DIR", "TRITON_CACHE_DIR", "AITER_JIT_DIR"])
@pytest.mark.parametrize(
    ("folder", "fault"),
    [
        ("test.yaml", "test.yaml is no folder"),
        ("test.yaml/below", "test.yaml is no folder"),
        ("/proc/none", "can't be written"),
        ("x" * 300, "can't be written"),
    ],
)
def test_a_cache_that_cannot_be_written_is_refused_before_the_start(
    tmp_path: Path, console: Console, variable: str, folder: str, fault: str
) -> None:
    loaded = load(tmp_path, ROCM.replace("TILELANG_CACHE_DIR: tilelang-cache", f"{variable}: {folder}"))
    with pytest.raises(InputError, match=rf"test\.yaml:\d+: {variable} is ") as refusal:
        prewarm.run_prewarm(console, loaded, good_facts(), [], tmp_path / "runs", True, False)
    assert fault in str(refusal.value) and len(refusal.value.faults) == 1
    assert not (tmp_path / "runs").exists()
