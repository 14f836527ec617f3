"""What is claimed of the fault is what was measured, and the demonstration notices where it isn't."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.fault import CASES, MARGIN, ROOT, broken_claims
from dspark_deploy.errors import NumericsRefused
from tuning.judging.comparison import chance_of_significance, verdict
from tuning.statistics import compare_paired

RESULT = json.loads((ROOT / "bench" / "results" / "fault.json").read_text())
ROWS: list[dict[str, Any]] = RESULT["rows"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.fault", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_the_claims_hold_for_what_was_kept() -> None:
    assert broken_claims(ROWS) == RESULT["broken_claims"] == []
    assert [row["fault"] for row in ROWS] == [case.name for case in CASES]
    assert {"engine", "hardware", "versions", "date"} <= RESULT["machine"].keys()


@pytest.mark.parametrize("row", range(1, len(CASES)))
@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("accuracy_gate", "verdict"), "inconclusive", "accuracy gate: claimed"),
        (("accuracy_gate", "exit_code"), 1, "its exit code: claimed"),
        (("acceptance_length",), 1.5, "acceptance length: claimed within"),
        (("numerics_gate",), "passed", "numerics gate: claimed wrong, seen passed"),
        (("ratio",), 1.0, "ratio: claimed 1.4142, seen 1.0"),
        (("boot", "exit_code"), None, f"claimed {NumericsRefused.exit_code}, seen None"),
    ],
)
def test_a_claim_that_is_not_seen_is_named(row: int, place: tuple[str, ...], value: Any, says: str) -> None:
    rows = copy.deepcopy(ROWS)
    *path, last = place
    part = rows[row]
    for name in path:
        part = part[name]
    part[last] = value
    (line,) = broken_claims(rows)
    assert line.startswith(f"{CASES[row].name}: ") and says in line


def test_the_verdict_has_room_to_spare() -> None:
    """A tenth fewer lost and a tenth more gained would still fail, and so many questions see such a loss."""
    row, asked = ROWS[1], RESULT["questions"]
    gate = row["accuracy_gate"]
    lost, gained = round(0.9 * gate["lost"]), round(1.1 * gate["gained"])
    before = [True] * lost + [False] * gained + [True] * (asked - lost - gained)
    after = [False] * lost + [True] * gained + [True] * (asked - lost - gained)
    assert verdict(compare_paired(before, after), MARGIN, 0.9) == "fail"
    assert chance_of_significance(-gate["difference"], asked, gate["lost"] + gate["gained"]) > 0.95
    for which in ("gained", "lost"):
        assert len(gate[f"{which}_questions"]) == gate[which] and max(gate[f"{which}_questions"]) < asked


@pytest.mark.parametrize("problems", ["0", "-1"])
def test_no_questions_are_refused(problems: str) -> None:
    done = run("--problems", problems)
    assert done.returncode == 2 and "ask one question at least" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("out", ["file/out.json", "folder"])
def test_a_place_that_takes_no_file_is_refused_before_a_boot(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    done = run("--out", str(tmp_path / out))
    assert done.returncode == 2 and "--out" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_as_one(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.fault"]
    with (tmp_path / "stderr").open("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=errors, stderr=errors)
        try:
            while "questions" not in (tmp_path / "stderr").read_text():
                assert process.poll() is None, (tmp_path / "stderr").read_text()
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(60) == 130
        finally:
            process.kill()
    said = (tmp_path / "stderr").read_text()
    assert "stopped by" in said and "Traceback" not in said
