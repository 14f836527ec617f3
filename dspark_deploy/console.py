"""How both commands talk: people's output, one JSON document, errors and exit codes.

With `--json` the last line of stdout is one JSON document and everything for people goes to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, NoReturn

import typer
from rich.console import Console

from dspark_deploy.errors import DSparkError, FileError, InputError, Interrupted
from dspark_deploy.preflight.findings import Finding, Severity
from dspark_deploy.redaction import mask_credentials

PLAIN_WIDTH = 140
# A full disk, a quota, a limit on a file's size: wherever they are met, the message is the same.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def people(as_json: bool) -> Console:
    """The console for people. `highlight` is off: a number in a message is no decoration."""
    stream = sys.stderr if as_json else sys.stdout
    # A log file has no width of its own, and 80 columns would fold every table.
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=as_json, highlight=False, soft_wrap=True, width=width)


def engine_log(quiet: bool) -> Callable[[str], None] | None:
    """What prints a line of the engine's log, dimmed and on stderr; None where it is to be quiet."""
    if quiet:
        return None
    console = Console(stderr=True, highlight=False, soft_wrap=True, style="dim")
    return lambda line: console.print(line, markup=False)


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on one line of stdout."""
    sys.stdout.write(json.dumps(document, separators=(", ", ": ")) + "\n")
    sys.stdout.flush()


@contextmanager
def interrupts() -> Iterator[None]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP raises Interrupted; a second one ends us at once.

    Ending at once is safe: whatever we started is under a guardian that notices.
    """

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print findings for people, in the order given."""
    colours = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
    for finding in findings:
        console.print(str(finding), style=colours[finding.severity], markup=False)


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command and end the process: errors as one message, with the exit code of their class."""
    _open_closed_streams()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("optuna").setLevel(logging.WARNING)
    try:
        try:
            with interrupts():
                app(prog_name=name)
        finally:
            sys.excepthook = _fault_of_ours  # typer has put its own there
    except DSparkError as error:
        faults = error.faults if isinstance(error, InputError) else []
        head = f"{len(faults)} faults in the input:\n" if len(faults) > 1 else ""
        message = mask_credentials(str(error))
        sys.stderr.write(f"{name}: {head}{message}\n")
        _exit(error.exit_code, message, error.document)
    except OSError as error:
        if error.errno not in FULL:
            raise
        message = f"{error.filename or 'a file'}: cannot be written: {error.strerror}"
        with contextlib.suppress(OSError):  # the terminal's own file may be what is full
            sys.stderr.write(f"{name}: {message}\n")
            _exit(FileError.exit_code, message)
        sys.exit(FileError.exit_code)
    except SystemExit as end:
        # A wrong flag: the usage message is on stderr already, and scripts still get their document.
        if end.code == InputError.exit_code:
            _exit(InputError.exit_code, "the command line could not be read; stderr says why")
        raise


def _open_closed_streams() -> None:
    """Streams closed before we began (`>&-`): Python has None there, and a file would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _exit(code: int, message: str, document: Mapping[str, Any] = MappingProxyType({})) -> NoReturn:
    if _wants_json():
        status = "interrupted" if code == Interrupted.exit_code else "error"
        print_json({**document, "status": status, "exit_code": code, "error": message})
    sys.exit(code)


def _wants_json() -> bool:
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    return "--json" in own


def _fault_of_ours(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What nothing foresaw: the traceback for whoever reports it, and the document for scripts."""
    sys.stderr.write(mask_credentials("".join(traceback.format_exception(kind, error, trace))))
    if _wants_json():
        message = mask_credentials(f"a fault of ours: {kind.__name__}: {error}")
        print_json({"status": "error", "exit_code": 1, "error": message})
