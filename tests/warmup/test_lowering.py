"""TileLang's real lowering to HIP for gfx950, with the device compiler stubbed: SIMULATED from there on."""

from __future__ import annotations

from tests.warmup.conftest import KERNELS, LOWERING, OURS, Simulate


def test_kernels_are_lowered_in_parallel_into_the_cache_of_a_launch(simulate: Simulate, version: str) -> None:
    seen = simulate(version, **LOWERING)
    post, with_norm = KERNELS
    pre = {
        "0.27.1": (),  # its AMD model passes no norm
        "0.30.0": OURS,  # whose kernel is wrong on a wavefront of 64, so ours are in its place
    }.get(version, (with_norm,))
    expected = (post, *pre)
    assert seen["in_runtime_cache"] == dict.fromkeys(expected, True)
    assert len(seen["sources"]) == len(expected)
    for source in seen["sources"]:
        assert "#include <hip/hip_runtime.h>" in source and "__global__" in source
    records = seen["compiles"]["records"]
    assert {(r["kernel"], r["phase"], r["source"]) for r in records} == {
        (kernel, "warm-up", "compiled") for kernel in expected
    }
    assert seen["cold_launches"] == 0, "a launch after the warm-up found every kernel"


def test_caches_stay_out_of_the_users_home(simulate: Simulate, version: str) -> None:
    seen = simulate(version, **LOWERING)
    assert seen["folder"] in seen["cache_folder"] and seen["folder"] in seen["triton_folder"]
