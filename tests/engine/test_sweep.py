"""`dspark-tune sweep` with the real CPU engine: interrupted, resumed, concluded, and its profile served."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dspark_deploy.profile import load_profile
from tests.engine.served import EXTRA_SET, all_gone

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

SWEEP = [
    *(sys.executable, "-m", "tuning.sweep", "sweep", "--profile", "cpu-tiny.yaml", "--out", "out", "--json"),
    *("--num-speculative-tokens", "none,5", "--draft-sample-method", "greedy"),
    *("--loads", "1,8", "--prompts-per-load", "16", "--accuracy-problems", "100"),
    *("--accuracy-margin", "0.06", "--boots", "0"),
    *EXTRA_SET,
]


def cell_started(folder: Path, label: str) -> bool:
    return (folder / "out" / "cells" / label / "engine.log").exists()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Interrupt a sweep in its second configuration, run it again; folder, result, stderr of both."""
    folder = tmp_path_factory.mktemp("sweep")
    errors = folder / "stderr"
    with errors.open("w") as err:
        first = subprocess.Popen(SWEEP, cwd=folder, stdout=subprocess.PIPE, stderr=err, text=True)
        deadline = time.monotonic() + 600
        while not cell_started(folder, "k5-greedy"):
            assert first.poll() is None and time.monotonic() < deadline, errors.read_text()
            time.sleep(0.2)
        family = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGINT)
        out, _ = first.communicate(timeout=120)
        assert first.returncode == 130, errors.read_text()
        assert json.loads(out.splitlines()[-1])["status"] == "interrupted"
        assert all_gone(family, 5)
        second = subprocess.run(
            SWEEP, cwd=folder, stdout=subprocess.PIPE, stderr=err, text=True, check=False, timeout=900
        )
    assert second.returncode == 0, errors.read_text()
    return folder, json.loads(second.stdout.splitlines()[-1]), errors.read_text()


def test_the_second_run_went_on_where_the_first_stopped(swept: tuple[Path, dict[str, Any], str]) -> None:
    _, _, errors = swept
    assert "2 configurations, 0 of them measured already" in errors
    assert "2 configurations, 1 of them measured already" in errors
    assert errors.count("none: booting the engine") == 1, "what was measured is not measured again"
    assert errors.count("k5-greedy: booting the engine") == 2


def test_what_the_tiny_pair_must_show(swept: tuple[Path, dict[str, Any], str]) -> None:
    """The promises of the built-in checkpoint, on 100 held-out problems over HTTP."""
    _, result, _ = swept
    none, k5 = result["cells"]
    assert (none["configuration"], k5["configuration"]) == ("none", "k5-greedy")
    assert k5["identical_answers"] >= 99
    assert k5["accuracy_acceptance_length"] > 3.5
    assert 0.6 <= none["accuracy"] <= 0.97
    assert none["acceptance_length"] == 1.0
    assert k5["accurate"] and result["unexpected"] == []
    for cell in (none, k5):
        assert [load["concurrency"] for load in cell["loads"]] == [1, 8]
        assert all(load["requests"] == 16 and load["prefix_hit_rate"] < 0.01 for load in cell["loads"])
        assert all(load["tpot_ms"] > 0 and load["ttft_ms_p50"] > 0 for load in cell["loads"])


def test_what_is_left_behind(swept: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, _ = swept
    best = load_profile(folder / "out" / "best.yaml").profile
    k = best.speculative.num_speculative_tokens if best.speculative else 0
    assert f"k{k}-greedy" == result["best"] or (k == 0 and result["best"] == "none")
    check = [sys.executable, "-m", "dspark_deploy.serve", "--profile", "out/best.yaml", "--check"]
    check += ["--set", "engine.port=0"]
    assert subprocess.run(check, cwd=folder, check=False, capture_output=True).returncode == 0
    assert "Acceptance by position" in (folder / "out" / "report.html").read_text()
    assert json.loads((folder / "out" / "result.json").read_text()) == result


def test_a_finished_sweep_boots_nothing_and_a_changed_one_is_refused(
    swept: tuple[Path, dict[str, Any], str],
) -> None:
    folder, result, _ = swept
    started = time.monotonic()
    again = subprocess.run(SWEEP, cwd=folder, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and json.loads(again.stdout.splitlines()[-1])["cells"] == result["cells"]
    changed = subprocess.run(
        [*SWEEP, "--loads", "1,4"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert changed.returncode == 2 and "WORKLOAD_CHANGED" in changed.stderr
    assert time.monotonic() - started < 150, "nothing was booted"
