"""What a person sees while a sweep runs: each step as a line, and on a terminal a view that stays in place.

The view says which part of the sweep this is, which configuration and trial, what the engine is asked at this
moment, the best so far at the lightest load, what other workers measure, and the time left. That is the mean
time of the configurations measured in this session, times those still owed, less what the present one has
used up. Until the first has ended there is no estimate, and none is shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from tuning.measurement import Measurement
from tuning.space import Configuration

REFRESH_PER_S = 2


@dataclass
class Board:
    """What lasts from one part of a sweep to the next: how long configurations took, and the best so far."""

    durations: list[float] = field(default_factory=list)
    best_label: str = ""
    best_ms: float = float("inf")
    load: int = 0

    def note(self, label: str, measurement: Measurement) -> None:
        """Take down a measurement; the best is by TPOT at the lightest load, whatever the goal."""
        lightest = min((each.result for each in measurement.loads), key=lambda result: result.concurrency)
        if lightest.mean_tpot_ms < self.best_ms:
            self.best_ms, self.best_label = lightest.mean_tpot_ms, label
            self.load = lightest.concurrency

    @property
    def best(self) -> str:
        """`k5-greedy, TPOT 4.20 ms @1`, or empty before anything was measured."""
        return f"{self.best_label}, TPOT {self.best_ms:.2f} ms @{self.load}" if self.best_label else ""


class SweepProgress:
    """Progress of one part over `total` configurations, of which `done` have ended already."""

    def __init__(
        self, console: Console, total: int, done: int, part: str = "search", board: Board | None = None
    ) -> None:
        self._console = console
        self._total = total
        self._done = done
        self._part = part
        self._board = board or Board()
        self._began = time.monotonic()
        self._label, self._number = "", 0
        self._phase, self._load, self._others = "", "", ""
        self._live = Live(
            console=console, get_renderable=self.view, refresh_per_second=REFRESH_PER_S, transient=True
        )

    def __enter__(self) -> SweepProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, label: str, number: int = 0) -> None:
        """A configuration is about to be measured, as trial `number`."""
        self._label, self._number = label, number
        self._phase = self._load = self._others = ""
        self._began = time.monotonic()

    def say(self, phase: str) -> None:
        """The configuration has come to a phase."""
        self._phase = phase
        self._load = phase.removeprefix("load ") if phase.startswith("load ") else ""
        left = self.time_left()
        self._console.print(
            f"[{self._done + 1}/{self._total}] {self._label}: {phase}" + (f"  ({left})" if left else ""),
            markup=False,
        )

    def wait(self, running: Iterable[Configuration]) -> None:
        """Nothing is left for this worker but what others measure; said once for each set of them."""
        others = ", ".join(sorted(each.label for each in running))
        if others != self._others:
            self._console.print(f"waiting for other workers: {others}", markup=False)
        self._others = others

    def end(self, summary: str, measurement: Measurement | None = None) -> None:
        """The configuration has ended, one way or the other."""
        self._done += 1
        self._board.durations.append(time.monotonic() - self._began)
        if measurement is not None:
            self._board.note(self._label, measurement)
        self._began = time.monotonic()
        self._console.print(f"[{self._done}/{self._total}] {self._label}: {summary}", markup=False)

    def time_left(self) -> str:
        """`about 4 min left`, or empty while there is nothing to estimate from."""
        owed = self._total - self._done
        durations = self._board.durations
        if not durations or owed <= 0:
            return ""
        mean = sum(durations) / len(durations)
        # The present one may take longer than its share; what is owed after it is still owed.
        present = max(mean - (time.monotonic() - self._began), 0.0)
        seconds = present + mean * (owed - 1)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def view(self) -> RenderableType:
        """The view as it is at this moment."""
        rows = {
            "part": f"{self._part}, {self._done} of {self._total}",
            "arm": f"{self._label}, trial {self._number}" if self._label else "",
            "phase": self._phase,
            "load": self._load,
            "best so far": self._board.best,
            "others": self._others,
            "time left": self.time_left() or "unknown until one has ended",
        }
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            if value:
                table.add_row(name, value)
        return Group(table, ProgressBar(total=max(self._total, 1), completed=self._done, width=40))


def one_line(measurement: Measurement) -> str:
    """A measurement in a line."""
    counts = measurement.accuracy
    tpots = ", ".join(
        f"TPOT {load.result.mean_tpot_ms:.2f} ms @{load.result.concurrency}" for load in measurement.loads
    )
    asked = f", accuracy {counts['correct']}/{counts['questions']}" if counts.get("questions") else ""
    return f"acceptance length {measurement.acceptance.length:.3f}, {tpots}{asked}"
