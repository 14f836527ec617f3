"""A signal while a command still imports its modules: exit code 130, one message, one document."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_deploy import beginning
from dspark_deploy.console import SIGNALS
from dspark_deploy.errors import Interrupted

COMMANDS = {
    "dspark-serve": "from dspark_deploy.beginning import serve; serve()",
    "dspark-tune": "from tuning.beginning import tune; tune()",
}
# Stands before the real module on the path, and says when Python has come to it.
SLOW = """import pathlib, time
pathlib.Path(__file__).with_suffix(".reached").touch()
time.sleep(60)
"""


def test_it_says_what_the_rest_says() -> None:
    assert Interrupted.exit_code == beginning.INTERRUPTED and beginning.SIGNALS == SIGNALS


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_python_imports(tmp_path: Path, name: str, number: signal.Signals) -> None:
    (tmp_path / "typer.py").write_text(SLOW)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        [sys.executable, "-c", COMMANDS[name], "--json"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "typer.reached").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors == f"{name}: stopped by {number.name}\n"
    document = {"status": "interrupted", "exit_code": 130, "error": f"stopped by {number.name}"}
    assert json.loads(output) == document


def test_a_command_begins_and_ends_as_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS["dspark-serve"], "--profile", str(tmp_path / "none.yaml"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "none.yaml" in done.stderr and "Traceback" not in done.stderr
