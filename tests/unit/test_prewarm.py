"""`dspark-serve --prewarm` around an engine that is a stand-in: started, waited for, stopped, reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspark_deploy.errors import InputError
from dspark_deploy.launch import prewarm
from dspark_deploy.launch.engine import ReadyReport
from dspark_deploy.plugin.amd.compiles import Compiles, Phase
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load

ROCM = TEXT.replace("{platform: cpu}", "{platform: rocm, arch: gfx950, gpus: 1}").replace(
    "  port: 8123\n", "  port: 8123\n  env: {TILELANG_CACHE_DIR: tilelang-cache}\n"
)


class StandIn:
    """An engine that compiles one kernel into the cache while it starts."""

    stopped = False

    @classmethod
    def start(cls, *_arguments: Any) -> StandIn:
        cls.stopped = False
        return cls()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_error: Any) -> None:
        StandIn.stopped = True

    def wait_ready(self, _echo: Any) -> ReadyReport:
        Path("tilelang-cache").mkdir()
        Path("tilelang-cache/kernel.so").write_bytes(b"1234567")
        compiles = Compiles()
        compiles.enter(Phase.WARMUP)
        with compiles.watch("tilelang", "mhc_post_tilelang", "((4, 5120), ())", 5) as record:
            record.source = "compiled"
        return ReadyReport("http://x", 40.0, [{"pid": 1, "compiles": compiles.as_json()}])


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prewarm, "Engine", StandIn)
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
