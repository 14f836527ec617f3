"""Calls a function when a module is loaded, so that a process which never loads it pays nothing.

    when_loaded("vllm.models.deepseek_v41.amd.dspark", examine_it)

A module that is loaded already is handed over at once. Otherwise one finder at the head of `sys.meta_path`
waits for the module's name, lets the other finders find it, and calls the function when the module's code
has run, before the statement that imported it goes on. What the function raises, the import raises.

Not covered: modules that are executed without the import system.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

OnLoad = Callable[[ModuleType], None]


class _Finder:
    """Finds nothing by itself; wraps the loader that another finder gave for a name that is waited for."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[OnLoad]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with the calls added to its loader."""
        if name not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    self._add_calls(name, spec.loader)
                return spec
        return None

    def _add_calls(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for call in self.waiting.pop(name, []):
                call(module)

        # On this loader object only: it was made for this one module.
        loader.exec_module = exec_module


_finder = _Finder()


def when_loaded(name: str, call: OnLoad) -> None:
    """Call `call(module)` as soon as the module `name` has been loaded, at once if it is loaded."""
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(call)


def still_waiting() -> list[str]:
    """Names of modules that have not been loaded yet."""
    return sorted(_finder.waiting)
