"""Patches: examined before they are installed, applied once, and each ends in a state with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_deploy.plugin.registry import (
    READY,
    Patch,
    PatchRefusedError,
    Registry,
    State,
    Verdict,
    not_applicable,
    refused,
    upstream,
)
from dspark_deploy.plugin.settings import SETTINGS_ENV, Settings


def patch(name: str, verdict: Verdict, calls: list[str], required: bool = False) -> Patch:
    def install() -> str:
        calls.append(name)
        return f"{name} is in"

    return Patch(name, f"target.{name}", "a reason", lambda: verdict, install, required)


def test_each_patch_ends_in_its_state() -> None:
    calls: list[str] = []
    registry = Registry()
    verdicts = {
        "a": READY,
        "b": upstream("has it"),
        "c": not_applicable("no such thing"),
        "d": refused("differs"),
    }
    registry.apply([patch(name, verdict, calls) for name, verdict in verdicts.items()])
    assert [(r.name, r.state, r.detail) for r in registry.records] == [
        ("a", State.APPLIED, "a is in"),
        ("b", State.UPSTREAM, "has it"),
        ("c", State.NOT_APPLICABLE, "no such thing"),
        ("d", State.REFUSED, "differs"),
    ]
    assert calls == ["a"], "only a patch that was found ready is installed"


def test_applying_twice_installs_once() -> None:
    calls: list[str] = []
    registry = Registry()
    for _ in range(2):
        registry.apply([patch("a", READY, calls)])
    assert calls == ["a"] and len(registry.records) == 1


def test_a_required_patch_that_is_refused_stops_after_the_others() -> None:
    calls: list[str] = []
    registry = Registry()
    with pytest.raises(PatchRefusedError, match=r"'a' on target\.a was refused: too old"):
        registry.apply([patch("a", refused("too old"), calls, required=True), patch("b", READY, calls)])
    assert calls == ["b"] and len(registry.records) == 2


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = Settings("cpu", tmp_path / "processes", cpu_twins=False)
    settings.write(tmp_path / "settings.json")
    assert Settings.read(tmp_path / "settings.json") == settings


def test_the_plugin_is_inert_and_cheap_outside_a_launch() -> None:
    script = (
        "import sys, time; t = time.process_time();"
        "import dspark_deploy.plugin as p; p.platform_hook(); p.general_hook();"
        "ms = (time.process_time() - t) * 1000;"
        "print(ms, [m for m in ('pydantic', 'typer', 'rich', 'httpx', 'torch') if m in sys.modules])"
    )
    env = {name: value for name, value in os.environ.items() if name != SETTINGS_ENV}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    milliseconds, _, modules = done.stdout.strip().partition(" ")
    assert modules == "[]"
    assert float(milliseconds) < 50


@pytest.mark.engine
def test_triton_interpreter_patches_in_a_fresh_process(tmp_path: Path) -> None:
    """The gaps are really there before, closed after; a second process that has them says upstream."""
    Settings("cpu", tmp_path / "processes").write(tmp_path / "settings.json")
    script = """
import torch, numpy as np
from triton.language.extra import libdevice
import dspark_deploy.plugin as plugin
from dspark_deploy.plugin.cpu_engine import triton_interpreter as ti
assert not ti._integer_mask_works()
assert ti._libdevice_handle("log1p") is None
plugin.platform_hook()
assert ti._integer_mask_works()
value = ti._libdevice_handle("log1p").handle.data[0]
assert abs(value - np.log1p(0.5)) < 1e-6, value
for patch in ti.patches():
    assert patch.examine().state == "upstream", patch.name
import triton, triton.language as tl
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
t = torch.arange(5, dtype=torch.float32)
double[(1,)](t, 4, BLOCK=8)
assert t.tolist() == [0, 2, 4, 6, 4], t
"""
    env = os.environ | {SETTINGS_ENV: str(tmp_path / "settings.json"), "TRITON_INTERPRET": "1"}
    file = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    file.write_text(script)
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = (tmp_path / "processes").glob("*.json")
    document = json.loads(report.read_text())
    assert {p["state"] for p in document["patches"]} == {"applied"}
    assert sum(document["milliseconds"].values()) < 50


@pytest.mark.engine
def test_without_the_interpreter_the_driver_patch_is_refused(tmp_path: Path) -> None:
    Settings("cpu", tmp_path / "processes").write(tmp_path / "settings.json")
    env = os.environ | {SETTINGS_ENV: str(tmp_path / "settings.json")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", "import dspark_deploy.plugin as p; p.platform_hook()"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "TRITON_INTERPRET=1 is not in this process's environment" in done.stderr
    (report,) = (tmp_path / "processes").glob("*.json")
    states = {p["name"]: p["state"] for p in json.loads(report.read_text())["patches"]}
    assert states["triton-interpreter-driver"] == "refused"
