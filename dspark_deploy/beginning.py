"""Where both commands begin: a signal while Python still imports the rest ends them as a later one does.

    dspark-serve = dspark_deploy.beginning:serve      dspark-tune = tuning.beginning:tune

The commands' own modules take 0.4 s to import, and only then is there anybody to answer a signal. Nothing has
been started by then, so the process ends at once, with exit code 130 and its one document under `--json`.

Not covered: Python's own start before this module, and `python -m dspark_deploy.serve`, which imports first.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130  # dspark_deploy.errors.Interrupted, which is not imported yet
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve() -> None:
    """Entry point of `dspark-serve`."""
    begin("dspark-serve", "dspark_deploy.serve")


def begin(name: str, module: str) -> None:
    """Import `module` and call its `main`; until that listens itself, a signal ends the process with 130."""
    before = {number: signal.signal(number, _stop(name)) for number in SIGNALS}
    try:
        main: Callable[[], None] = importlib.import_module(module).main
        main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(name: str) -> Callable[[int, FrameType | None], None]:
    def stop(number: int, _frame: FrameType | None) -> None:
        message = f"stopped by {signal.Signals(number).name}"
        arguments = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
        lines = {2: f"{name}: {message}\n"}
        if "--json" in arguments:
            lines[1] = f'{{"status": "interrupted", "exit_code": {INTERRUPTED}, "error": "{message}"}}\n'
        for stream, line in lines.items():
            try:
                os.write(stream, line.encode())
            except OSError:  # closed, or a terminal that is gone; the code says it all the same
                continue
        # Past every import that is half done, and past their exception handlers.
        os._exit(INTERRUPTED)

    return stop
