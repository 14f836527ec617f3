"""`dspark-tune` in this process: the exit code and the JSON document of one command line.

A process of its own takes seconds to import; what differs there (signals, a closed pipe) has tests elsewhere.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tuning.results import result_faults


@dataclass
class Done:
    """How a command ended. `document` is its last line of stdout."""

    code: int
    document: dict[str, Any]
    stderr: str


class Tune:
    """Call it with arguments; `--json` is added."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Done:
        from tuning.sweep import main

        self._monkeypatch.setattr(sys, "argv", ["dspark-tune", *map(str, arguments), "--json"])
        self._monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = self._capsys.readouterr()
        document = json.loads(captured.out.splitlines()[-1])
        if {"kind", "result"} <= document.keys():
            assert result_faults(document["kind"], document["result"]) == [], "a record as it is published"
        return Done(int(ended.value.code or 0), document, captured.err)
