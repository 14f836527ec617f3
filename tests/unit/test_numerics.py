"""What the command makes of the gate's sections: exit code 4, a table, and waiting for every worker.

Not covered here: the gate itself, which `tests/numerics` runs on vLLM's operators.
"""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dspark_deploy.errors import EngineStartError, NumericsRefused
from dspark_deploy.launch import numerics
from dspark_deploy.launch.engine import Engine
from dspark_deploy.launch.rundir import RunDirectory
from dspark_deploy.profile import load_profile
from tests.unit.facts import good_facts


def row(tokens: int, ratio: float, cause: str = "", nans: int = 0) -> dict[str, Any]:
    return {
        "place": "target layers.0.mhc_pre",
        "operator": "MHCPreOp",
        "variant": "with norm",
        "route": "forward_hip",
        "hidden": 4096,
        "tokens": tokens,
        "output": "layer_input",
        "ratio": None if nans else ratio,
        "nrmse": None if nans else abs(ratio - 1),
        "worst": None if nans else abs(ratio - 1),
        "nans": nans,
        "microseconds": 10.0,
        "cause": cause,
    }


def section(*rows: dict[str, Any], workers: int = 1, reason: str = "") -> dict[str, Any]:
    wrong = any(each["cause"] for each in rows)
    state = "wrong" if wrong else "passed" if rows else "not applicable"
    return {
        "workers": workers,
        "pid": 71,
        "rank": 3,
        "state": state,
        "reason": reason,
        "device": "gpu",
        "seconds": 1.0,
        "operators": len(rows),
        "rows": list(rows),
        "unchecked": [],
    }


def engine(folder: Path, code: int | None, limit: int = 5) -> Engine:
    """An engine whose process has ended with `code`, or runs on."""
    run = RunDirectory(folder)
    run.processes.mkdir()
    run.log.write_text("")
    loaded = load_profile("cpu-v4.yaml", [f"engine.ready_timeout_s={limit}", "engine.host=127.0.0.1"])
    process: Any = SimpleNamespace(poll=lambda: code, stop=lambda: 0)
    return Engine(process, loaded, run, 9, good_facts())


def leave(folder: Path, *sections: dict[str, Any] | None) -> None:
    """Reports of processes, with or without a section of the gate."""
    for number, found in enumerate(sections):
        report = {"pid": number} | ({} if found is None else {"numerics": found})
        (folder / "processes" / f"{number}.json").write_text(json.dumps(report))


def test_an_engine_that_the_gate_ended_is_exit_code_4(tmp_path: Path) -> None:
    ended = engine(tmp_path, 1)
    leave(tmp_path, None, section(row(8, 1.0), row(64, 1.4142, "A norm over half of the elements.")))
    with pytest.raises(NumericsRefused) as refused:
        ended.wait_ready()
    assert refused.value.exit_code == 4
    for word in ("MHCPreOp", "forward_hip", "1.4142", "64 tokens", "norm over half", "mhc.gate: warn"):
        assert word in str(refused.value), (word, str(refused.value))
    assert refused.value.document["numerics"][0]["state"] == "wrong"


def test_an_engine_that_ended_for_another_reason_is_not(tmp_path: Path) -> None:
    ended = engine(tmp_path, 1)
    leave(tmp_path, section(row(8, 1.0)))
    with pytest.raises(EngineStartError) as failed:
        ended.wait_ready()
    assert failed.value.exit_code == 5


def test_every_worker_is_waited_for(tmp_path: Path) -> None:
    running = engine(tmp_path, None, limit=1)
    leave(tmp_path, None, section(row(8, 1.0), workers=2))
    started = time.monotonic()
    with pytest.raises(EngineStartError):
        running.wait_numerics()
    assert time.monotonic() - started > 1
    leave(tmp_path, section(row(8, 1.0), workers=2), section(row(8, 1.0), workers=2))
    assert len(running.wait_numerics()) == 2


def test_the_worst_row_speaks() -> None:
    rows = [
        row(1, 1.5, "noisy"),
        row(1024, 1.4142, "steady"),
        row(513, 0, "never written", nans=3),
        row(8, 1.0),
    ]
    assert numerics.worst([section(*rows[:2])])[0]["tokens"] == 1024
    assert numerics.worst([section(*rows)])[0]["nans"] == 3
    assert numerics.worst([section(row(1, 1.001), row(8, 1.004))])[0]["tokens"] == 8


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([section(reason="model has no mHC ops")], "not applicable: model has no mHC ops"),
        ([section(row(8, 1.0))], "numerics gate: passed, 1 operators in 1 workers on gpu"),
        ([section(row(8, 1.4, "A norm."))], "numerics gate: wrong"),
    ],
)
def test_people_read_the_verdict(found: list[dict[str, Any]], says: str) -> None:
    text = io.StringIO()
    numerics.show(Console(file=text, width=140), found)
    assert says in text.getvalue(), text.getvalue()
