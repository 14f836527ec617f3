"""The live view: what a person sees at any moment of a sweep, on a terminal and in a log."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from tests.support.stand_in import StandIn
from tests.support.sweeps import SWEEP, sweep
from tests.unit.measurements import measurement
from tuning.progress import Board, SweepProgress
from tuning.space import Configuration


def shown(progress: SweepProgress) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(progress.view())
    return console.export_text()


def progress(board: Board | None = None, total: int = 4, done: int = 1) -> SweepProgress:
    return SweepProgress(Console(file=io.StringIO(), width=100), total, done, "finalists", board)


def test_the_view_names_part_arm_trial_phase_load_and_best() -> None:
    board = Board()
    view = progress(board)
    view.begin("k5-greedy", 7)
    view.say("load 8")
    text = shown(view)
    for words in ("finalists, 1 of 4", "k5-greedy, trial 7", "load 8", "unknown until one has ended"):
        assert words in text
    assert "best so far" not in text
    view.end("done", measurement({8: [9.0], 1: [4.0]}, 5))
    view.begin("k3-greedy", 8)
    view.say("accuracy, 100 problems")
    text = shown(view)
    assert "best so far" in text and "k5-greedy, TPOT 4.00 ms @1" in text
    assert "finalists, 2 of 4" in text and "accuracy, 100 problems" in text and "left" in text
    view.end("done", measurement({1: [5.0]}, 3))
    assert "k5-greedy, TPOT 4.00" in shown(view), "the better one stays"


def test_time_left_is_the_mean_times_what_is_owed() -> None:
    view = progress(Board(durations=[600.0, 1200.0]), total=4, done=1)
    view.begin("k1-greedy")
    assert view.time_left() == "about 45 min left"
    assert progress(Board(durations=[10.0]), 4, 4).time_left() == ""
    assert progress(Board(durations=[20.0]), 4, 2).time_left() == "about 40 s left"


def test_other_workers_are_named_once() -> None:
    out = io.StringIO()
    view = SweepProgress(Console(file=out, width=100), 4, 3)
    for _ in range(3):
        view.wait([Configuration(5, "greedy")])
    assert out.getvalue().count("waiting for other workers: k5-greedy") == 1
    assert "k5-greedy" in shown(view)


def test_a_log_gets_lines_and_no_control_characters(tmp_path: Path) -> None:
    done = sweep(tmp_path, StandIn(), SWEEP)
    assert "[1/4] none: booting the engine" in done.text
    assert "\x1b" not in (tmp_path / "console").read_text()


def test_a_terminal_gets_the_view(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with SweepProgress(console, 2, 0, "search") as view:
        view.begin("none", 0)
        view.say("load 1")
    assert "search, 0 of 2" in out.getvalue() and "none, trial 0" in out.getvalue()
