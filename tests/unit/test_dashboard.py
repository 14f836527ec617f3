"""optuna-dashboard on a sweep's own storage. Skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from dspark_deploy.launch.engine import free_port
from tests.support.stand_in import StandIn
from tests.support.sweeps import SWEEP, sweep


def test_the_dashboard_shows_a_sweep(tmp_path: Path) -> None:
    if importlib.util.find_spec("optuna_dashboard") is None:
        pytest.skip("optuna-dashboard is not installed: pip install 'dspark-deploy[dashboard]'")
    program = shutil.which("optuna-dashboard", path=str(Path(sys.executable).parent)) or "optuna-dashboard"
    sweep(tmp_path, StandIn(wrong_for={"k5-greedy": 30}), SWEEP)
    port = free_port("127.0.0.1")
    url = f"sqlite:///{tmp_path}/out/study.db"
    process = subprocess.Popen(
        [program, url, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        api = f"http://127.0.0.1:{port}/api/studies"
        deadline = time.monotonic() + 60
        while True:
            try:
                (study,) = httpx.get(api, timeout=5).json()["study_summaries"]
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        assert study["study_name"].startswith("dspark-sweep-test-")
        detail = httpx.get(f"{api}/{study['study_id']}", timeout=5).json()
        assert detail["objective_names"] == ["tpot_ms", "output_tokens_per_s_per_gpu"]
        trials = detail["trials"]
        assert [trial["state"] for trial in trials] == ["Complete"] * 4
        lost = [
            {each["name"]: each["param_external_value"] for each in trial["params"]}
            for trial in trials
            if any(a["key"] == "accuracy_kept" and a["value"].lower() == "false" for a in trial["user_attrs"])
        ]
        assert lost == [{"num_speculative_tokens": "5", "draft_sample_method": "greedy"}]
        assert {each["key"] for each in detail["union_user_attrs"]} >= {"tpot_ms@1", "tpot_ms@8"}
    finally:
        process.terminate()
        process.wait(timeout=30)
