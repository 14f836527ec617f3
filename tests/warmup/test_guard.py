"""The capture guard, SIMULATED: hooks on the real TileLang and Triton, and on a module built like AITER's."""

from __future__ import annotations

import pytest

from tests.warmup.conftest import Simulate

GUARD = ["tilelang.jit", "triton.knobs", "aiter.jit.core"]


@pytest.mark.parametrize("phase", ["capture", "serving"])
@pytest.mark.parametrize("library", ["tilelang", "triton", "aiter"])
def test_error_refuses_and_names_what(simulate: Simulate, version: str, library: str, phase: str) -> None:
    refused = simulate(version, guard="error", case="guard")["refused"][phase][library]
    assert refused is not None, "it was compiled"
    for part in (library, "key", "tokens"):
        assert part in refused
    if library == "tilelang":
        assert "mhc_post_tilelang" in refused and "(4, 5120, 128, 1024)" in refused and "5 tokens" in refused


def test_without_the_patches_nothing_is_refused(simulate: Simulate) -> None:
    refused = simulate("0.33.0", guard="error", case="guard", without=GUARD)["refused"]
    assert refused["serving"] == {"tilelang": None, "triton": None, "aiter": None}


def test_warn_counts_and_lets_compile(simulate: Simulate, version: str) -> None:
    seen = simulate(version, guard="warn", case="guard")
    assert seen["refused"]["serving"] == {"tilelang": None, "triton": None, "aiter": None}
    assert seen["compiles"]["refused"] == 0
    found = {(r["library"], r["kernel"], r["phase"]) for r in seen["compiles"]["records"]}
    assert {("tilelang", "mhc_post_tilelang", "serving"), ("aiter", "module_mhc", "serving")} <= found


def test_off_installs_nothing(simulate: Simulate) -> None:
    seen = simulate("0.33.0", guard="off", case="guard")
    states = {name: p["state"] for name, p in seen["patches"].items() if name.startswith("capture-guard")}
    assert set(states.values()) == {"not applicable"} and len(states) == 3
    assert seen["compiles"]["records"] == []


def test_triton_tells_a_compile_from_a_load(simulate: Simulate) -> None:
    """Triton compiles one kernel for gfx950, which needs no GPU, and finds it on disk the second time."""
    seen = simulate("0.33.0", guard="warn", case="guard")
    sources = [r["source"] for r in seen["compiles"]["records"] if r["library"] == "triton"]
    assert sources[:2] == ["compiled", "disk"], sources
