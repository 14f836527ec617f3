"""A command under a guardian: started with its output in a file, watched, stopped, and gone when we are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

# Run by its path, so that neither this package's imports nor the engine's PYTHONPATH reach it.
GUARDIAN = Path(__file__).with_name("guardian.py")
GUARDIAN_MARGIN_S = 15.0


class Supervised:
    """One running command. `stop` is idempotent; leaving the `with` block stops it too.

    `log` receives stdout and stderr. `grace_s` is what the command gets between SIGTERM and SIGKILL.
    Raises OSError where the log can't be opened.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, grace_s: float = 30
    ) -> None:
        self.command = list(command)
        self.log = log
        self._grace_s = grace_s
        reading, self._writing = os.pipe()
        guarded = [sys.executable, "-I", str(GUARDIAN), str(reading), str(grace_s), "--"]
        try:
            with log.open("ab") as output:
                self._guardian = subprocess.Popen(
                    [*guarded, *self.command],
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[reading],
                    start_new_session=True,
                )
        except OSError:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)
        self._open = True

    @property
    def pid(self) -> int:
        """The guardian's process number; everything the command starts is below it."""
        return self._guardian.pid

    def poll(self) -> int | None:
        """The command's exit code once it has ended, else None."""
        return self._guardian.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        return self._guardian.wait(timeout_s)

    def stop(self) -> int:
        """End the command and all it started; returns its exit code."""
        if self._open:
            self._open = False
            os.close(self._writing)
        try:
            return self._guardian.wait(self._grace_s + GUARDIAN_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            return self._guardian.wait()

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
