"""Patches that wait for a module: called once, after its code and before its importer goes on."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from dspark_deploy.plugin.when_loaded import still_waiting, when_loaded


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    (tmp_path / "importer.py").write_text("from waited_for import value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("waited_for", "importer"):
        sys.modules.pop(name, None)
    return "waited_for"


def test_called_before_the_importer_copies_a_value(module: str) -> None:
    when_loaded(module, lambda loaded: setattr(loaded, "value", 2))
    assert module in still_waiting()
    assert importlib.import_module("importer").value == 2
    assert module not in still_waiting()


def test_called_at_once_for_a_loaded_module(module: str) -> None:
    importlib.import_module(module)
    seen: list[str] = []
    when_loaded(module, lambda loaded: seen.append(loaded.__name__))
    assert seen == [module]


def test_called_once(module: str) -> None:
    seen: list[str] = []
    when_loaded(module, lambda loaded: seen.append(loaded.__name__))
    importlib.reload(importlib.import_module(module))
    assert seen == [module]


def test_what_it_raises_the_import_raises(module: str) -> None:
    def refuse(_loaded: object) -> None:
        raise RuntimeError("refused")

    when_loaded(module, refuse)
    with pytest.raises(RuntimeError, match="refused"):
        importlib.import_module(module)
    assert module not in sys.modules
