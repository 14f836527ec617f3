"""Comparing two runs: exact McNemar, the margin, the null, power, and the gate's exit codes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from scipy import stats

from dspark_deploy.errors import InputError
from tests.support.cli import Tune
from tuning.accuracy import AccuracyRun, Item
from tuning.commands.compare import read_run
from tuning.judging.comparison import (
    chance_of_significance,
    compare,
    conditional_interval,
    paired,
    power,
    smallest_significant_loss,
)
from tuning.statistics import compare_paired

N = 1319


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return Tune(monkeypatch, capsys)


def run(right: list[bool]) -> AccuracyRun:
    return AccuracyRun(
        [Item(f"q{i}", "1", "1" if r else "2", r, "answered", f"{r}", "stop") for i, r in enumerate(right)]
    )


def pair(gained: int, lost: int, n: int = N) -> tuple[AccuracyRun, AccuracyRun]:
    rest = [True] * (n - gained - lost)
    return run([False] * gained + [True] * lost + rest), run([True] * gained + [False] * lost + rest)


@pytest.mark.parametrize(("discordant", "points"), [(20, 0.76), (40, 1.06), (60, 1.36), (100, 1.67)])
def test_what_1319_questions_can_see(discordant: int, points: float) -> None:
    found = smallest_significant_loss(N, discordant)
    assert found is not None and round(found * 100, 2) == points
    assert smallest_significant_loss(N, 4) is None, "four pairs are never significant"


def test_gained_lost_p_and_both_intervals() -> None:
    found = compare_paired(*(one.correct for one in pair(14, 22)))
    assert found.p_value == pytest.approx(0.243, abs=5e-4)
    interval = conditional_interval(found)
    assert (interval.low, interval.high) == pytest.approx((-0.0147, 0.0036), abs=5e-4)
    worse = compare_paired(*(one.correct for one in pair(10, 26)))
    assert worse.p_value == pytest.approx(0.011, abs=5e-4)
    assert conditional_interval(compare_paired([True], [True])).low == 0


@pytest.mark.parametrize(
    ("gained", "lost", "margin", "expected"),
    [
        (5, 5, 0.01, "pass"),
        (60, 60, 0.01, "inconclusive"),
        (10, 26, 0.01, "fail"),
        (14, 22, 0.01, "inconclusive"),
        (10, 26, 0.03, "pass"),
        (0, 400, 0.05, "fail"),
        (30, 2, 0.001, "pass"),
    ],
)
def test_verdicts(gained: int, lost: int, margin: float, expected: str) -> None:
    found = compare(*pair(gained, lost), margin)
    assert found["verdict"] == expected
    assert len(found["gained"]) == gained and len(found["lost"]) == lost


def test_the_null_is_shown_and_sets_the_power() -> None:
    same = pair(30, 30)
    found = compare(*pair(2, 3), 0.01, same)
    assert (found["null"]["gained"], found["null"]["lost"], found["power"]["discordant"]) == (30, 30, 60)
    assert found["null"]["identical_answers"] == N - 60
    assert found["verdict"] == "pass", "the null is information, and no excuse"


def test_power_is_what_simulated_losses_give() -> None:
    n, discordant, loss = 400, 30, 0.04
    draw, significant, trials = random.Random(1), 0, 1500
    for _ in range(trials):
        lost = sum(draw.random() < (1 + loss * n / discordant) / 2 for _ in range(discordant))
        significant += lost > discordant / 2 and stats.binomtest(lost, discordant).pvalue <= 0.05
    assert chance_of_significance(loss, n, discordant) == pytest.approx(significant / trials, abs=0.04)
    found = power(n, discordant, 0.01)
    assert found.loss_seen_8_of_10 is not None
    assert chance_of_significance(found.loss_seen_8_of_10, n, discordant) >= 0.8
    assert chance_of_significance(found.loss_seen_8_of_10 - 1 / n, n, discordant) < 0.8


def test_power_of_an_equal_pair_to_pass() -> None:
    assert power(N, 6, 0.01).equal_pair_passes > 0.95
    assert power(N, 100, 0.01).equal_pair_passes < 0.5
    assert power(100, 0, 0.01).equal_pair_passes == 0.0, "100 questions can't show 1 point, whatever they say"


def test_equal_builds_fail_rarely_and_real_losses_seldom_pass() -> None:
    """The gate's own error rates, simulated: 500 questions, 8 % discordant, margin 3 points."""
    draw = random.Random(7)
    verdicts: dict[float, list[str]] = {0.0: [], 0.06: []}
    for loss, found in verdicts.items():
        for _ in range(200):
            before = [draw.random() < 0.9 for _ in range(500)]
            after = [
                (right and draw.random() >= (0.02 + loss) / 0.9) or (not right and draw.random() < 0.2)
                for right in before
            ]
            found.append((compare_paired(before, after).not_worse_than(0.03) and "pass") or "no")
    assert verdicts[0.0].count("pass") > 150
    assert verdicts[0.06].count("pass") <= 2


@pytest.mark.parametrize(("right", "expected"), [(0, "inconclusive"), (13, "inconclusive"), (14, "pass")])
def test_nothing_is_shown_where_there_is_nothing_to_lose(
    tune: Tune, tmp_path: Path, right: int, expected: str
) -> None:
    one = run([True] * right + [False] * (N - right))
    assert compare(one, one, 0.01)["verdict"] == expected
    one.write(tmp_path / "one.jsonl")
    done = tune("accuracy-gate", tmp_path / "one.jsonl", tmp_path / "one.jsonl")
    assert done.code == (0 if expected == "pass" else 7)
    assert ("nothing to lose" in done.stderr) is (expected != "pass")


def test_runs_over_other_questions_make_no_pairs() -> None:
    first, second = pair(1, 1, 10)
    with pytest.raises(InputError, match="different questions"):
        paired(first, AccuracyRun(second.items[:5]))
    other = AccuracyRun([Item(**{**_fields(item), "gold": "9"}) for item in second.items])
    with pytest.raises(InputError, match="call different answers right"):
        paired(first, other)


def _fields(item: Item) -> dict[str, object]:
    return {name: getattr(item, name) for name in Item.__slots__}


def write(folder: Path, gained: int, lost: int, n: int = N) -> list[Path]:
    files = [folder / "before.jsonl", folder / "after.jsonl"]
    for file, one in zip(files, pair(gained, lost, n), strict=True):
        one.write(file)
    return files


@pytest.mark.parametrize(
    ("gained", "lost", "compare_code", "gate_code"), [(5, 5, 0, 0), (14, 22, 0, 7), (10, 40, 7, 7)]
)
def test_exit_codes(
    tune: Tune, tmp_path: Path, gained: int, lost: int, compare_code: int, gate_code: int
) -> None:
    files = write(tmp_path, gained, lost)
    compared = tune("compare", *files)
    gated = tune("accuracy-gate", *files, "--out", tmp_path / "record.json")
    assert (compared.code, gated.code) == (compare_code, gate_code), gated.stderr
    assert gated.document["result"]["comparison"]["lost"] == lost
    assert (tmp_path / "record.json").exists()
    assert compared.document["result"]["verdict"] == gated.document["result"]["verdict"]


SOUND = {"id": "q0", "gold": "7", "answer": "7", "correct": True, "state": "answered", "text": "#### 7"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"answer": "-1"}, "correct is True, with answer '-1' and gold '7'"),
        ({"correct": False}, "correct is False, with answer '7'"),
        ({"correct": "no"}, "correct: Input should be a valid boolean"),
        ({"state": "wat"}, "'wat' is none of answered"),
        ({"text": None}, "text: Input should be a valid string"),
        ({"tokens": -5}, "tokens: Input should be greater"),
        ({"tokens": 10**30}, "tokens: Input should be"),
        ({"histogram": "x"}, "histogram: Input should be a valid array"),
        ({"histogram": [1, -1]}, "histogram.1: Input should be greater"),
        ({"finish_reason": "length"}, "finish_reason is length, and the state answered"),
        ({"state": "truncated", "finish_reason": "stop"}, "finish_reason isn't length"),
        ({"answer": None, "correct": False}, "without an answer"),
        ({"state": "unparsed"}, "unparsed, with an answer"),
        ({"state": "error"}, "error, with an answer"),
        ({"completion": "#### 7"}, "gsm8k score FILE --out FOLDER"),
        ({"mine": 1}, "unknown field 'mine'"),
    ],
)
def test_an_item_that_contradicts_itself_is_no_evidence(
    tune: Tune, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    files = [tmp_path / "sound.jsonl", tmp_path / "damaged.jsonl"]
    files[0].write_text(json.dumps(SOUND) + "\n")
    assert AccuracyRun.read(files[0]).items[0].correct
    files[1].write_text(json.dumps(SOUND | {"id": "q-1"}) + "\n\n" + json.dumps(SOUND | changes) + "\n")
    done = tune("accuracy-gate", *files)
    assert done.code == 2 and "damaged.jsonl:3: " in done.document["error"], done.document
    assert says in done.document["error"] and "Error(" not in done.document["error"]


@pytest.mark.parametrize("text", ["", "\n\n", "[1]\n", "7\n", '{"id": 1}\n'])
def test_a_file_without_items(tune: Tune, tmp_path: Path, text: str) -> None:
    files = write(tmp_path, 1, 1, 20)
    files[1].write_text(text)
    done = tune("compare", *files)
    assert done.code == 2 and "after.jsonl" in done.document["error"], done.document


def test_a_question_counts_once(tune: Tune, tmp_path: Path) -> None:
    files = write(tmp_path, 0, 0, 300)
    for file in files:
        file.write_text(file.read_text() * 2)
    done = tune("accuracy-gate", *files)
    assert done.code == 2 and "before.jsonl:301" in done.document["error"]
    assert "'q0' is there already" in done.document["error"]


def test_a_run_that_was_cut_off_has_no_accuracy_to_compare(tune: Tune, tmp_path: Path) -> None:
    cut = {"answer": None, "correct": False, "state": "truncated", "finish_reason": "length"}
    for name, few in (("few", 1), ("many", 2)):
        rows = [SOUND | {"id": f"q{i}"} | (cut if i < few else {}) for i in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    assert tune("compare", few, few).code == 0
    for files in ((few, many), (many, few), (few, few, "--null", few, "--null", many)):
        done = tune("compare", *files)
        assert done.code == 2 and "many.jsonl: has no accuracy" in done.document["error"]
        assert "2 of 100 answers were cut off" in done.document["error"]


def test_a_line_separator_in_an_answer_ends_no_line(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text(json.dumps(SOUND | {"text": "one\u2028two\x85 7"}, ensure_ascii=False) + "\n")
    assert AccuracyRun.read(file).items[0].text == "one\u2028two\x85 7"


def test_bad_input_says_what_to_do(tune: Tune, tmp_path: Path) -> None:
    files = write(tmp_path, 1, 1, 20)
    assert "--null wants two" in tune("compare", *files, "--null", files[0]).document["error"]
    assert "no file of answered" in tune("compare", files[0], "nowhere.jsonl").document["error"]
    assert "items.jsonl" in tune("compare", files[0], tmp_path).document["error"]
    failed = AccuracyRun([Item("q", "1", None, False, "error", "")])
    failed.write(tmp_path / "failed.jsonl")
    with pytest.raises(InputError, match="1 requests failed"):
        read_run(tmp_path / "failed.jsonl", "fixed")
    files[1].write_text('{"id": 1}\n')
    assert tune("compare", *files).code == 2
