"""What a person sees while a sweep runs: each step as a line, and on a terminal a bar with the time left.

The time left is the mean time of the configurations measured in this session, times those still owed, less
what the present one has used up. Until the first has ended there is no estimate, and none is shown.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class SweepProgress:
    """Progress over `total` configurations, of which `done` were there already."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console = console
        self._total = total
        self._done = done
        self._durations: list[float] = []
        self._began = time.monotonic()
        self._label = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("sweep", total=total, completed=done, left="")

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, label: str) -> None:
        """A configuration is about to be measured."""
        self._label = label
        self._began = time.monotonic()
        self._bar.update(self._task, description=label, left=self.time_left())

    def say(self, phase: str) -> None:
        """The configuration has come to a phase."""
        left = self.time_left()
        self._bar.update(self._task, description=f"{self._label}: {phase}", left=left)
        self._console.print(
            f"[{self._done + 1}/{self._total}] {self._label}: {phase}" + (f"  ({left})" if left else ""),
            markup=False,
        )

    def end(self, summary: str) -> None:
        """The configuration has ended, one way or the other."""
        self._done += 1
        self._durations.append(time.monotonic() - self._began)
        self._began = time.monotonic()
        self._bar.update(self._task, completed=self._done, left=self.time_left())
        self._console.print(f"[{self._done}/{self._total}] {self._label}: {summary}", markup=False)

    def time_left(self) -> str:
        """`about 4 min left`, or empty while there is nothing to estimate from."""
        owed = self._total - self._done
        if not self._durations or not owed:
            return ""
        mean = sum(self._durations) / len(self._durations)
        # The present one may take longer than its share; what is owed after it is still owed.
        present = max(mean - (time.monotonic() - self._began), 0.0)
        seconds = present + mean * (owed - 1)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
