"""The demonstration of the fault in brief: an engine that serves with it, one that is refused, real commands.

What the whole of it shows, over hundreds of questions, is in `bench/results/fault.json`, which
`tests/unit/test_fault_claims.py` holds against the claims.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fault import CASES, HEALTHY, answer, judge, refusing
from tuning.accuracy import AccuracyRun

pytestmark = pytest.mark.engine
QUESTIONS = 32


def test_the_fault_is_seen_by_the_commands(tmp_path: Path) -> None:
    cases = {case.name: case for case in CASES}
    folders = {name: tmp_path / name for name in cases}
    for folder in folders.values():
        folder.mkdir()
    both, target = cases["target and draft"], cases["the target alone"]
    seen = answer(both, QUESTIONS, folders[both.name])
    assert seen["numerics_gate"] == "wrong" and seen["ratio"] == pytest.approx(2**0.5, abs=0.01)
    assert seen["acceptance_length"] > 4, "nothing of it shows in acceptance"
    answered = AccuracyRun.read(folders[both.name] / "items.jsonl")
    assert len(answered.items) == QUESTIONS and seen["correct"] == sum(answered.correct) > QUESTIONS / 2
    answered.write(folders[HEALTHY] / "items.jsonl")
    judged = judge(both, folders[both.name])
    assert (judged["verdict"], judged["exit_code"], judged["lost_questions"]) == ("inconclusive", 7, [])
    with refusing(target, folders[target.name]) as end:
        ended = end()
    assert ended["exit_code"] == 4 and "ratio 1.41" in ended["error"], ended
