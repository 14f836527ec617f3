"""Closure, SIMULATED: every kernel key that target and draft ask for, at every token count, was warmed.

max_num_batched_tokens is 8192. The sweep takes every token count up to 576, and those around each larger
constant of the dispatch code, where alone the choice of a kernel can change; `conftest` says how to take all
8192. It calls the models themselves, not the warm-up's copy of them, with the guard
counting compiles: the warm-up has missed a key exactly if the guard counts one. The expected keys are not
written down here; what is written down are the few that public reports and the dispatch code name, as a
check of the check.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.warmup.conftest import EVERY_UP_TO, HIDDEN, Simulate, families, main_worker


def closure(simulate: Simulate, version: str, arch: str, aiter: bool) -> dict[str, Any]:
    """Warm and sweep every family and hidden size in one simulated worker."""
    return simulate(version, **main_worker(arch, aiter))


def is_closed(seen: dict[str, Any]) -> bool:
    """No compile while serving, and everything that was asked for was in the set warmed."""
    return all(
        not each["serving_compiles"]
        and {k for keys in each["asked"].values() for k in keys} <= set(each["warmed"])
        for each in seen["families"].values()
    )


@pytest.mark.parametrize("aiter", [False, True], ids=["tilelang", "aiter"])
def test_keys_asked_for_were_warmed_on_gfx950(simulate: Simulate, version: str, aiter: bool) -> None:
    seen = closure(simulate, version, "gfx950", aiter)
    assert set(seen["families"]) == {f"{f} {hidden}" for f in families(version) for hidden in HIDDEN}
    assert is_closed(seen)
    for name, each in seen["families"].items():
        assert each["asked"]["target"], f"{name}: the sweep has seen nothing, so it shows nothing"
        assert each["warmed"] == sorted({k for keys in each["asked"].values() for k in keys}), (
            "no key too many"
        )


def test_without_the_warm_up_every_key_compiles_while_serving(simulate: Simulate) -> None:
    small = {"case": "closure", "hidden": [4096], "every_up_to": 40, "max_tokens": 40}
    seen = simulate("0.33.0", families=["deepseek_v41"], skip_warm_up=True, **small)
    found = seen["families"]["deepseek_v41 4096"]
    assert not is_closed(seen) and found["warmed"] == []
    assert len(found["serving_compiles"]) == len({k for keys in found["asked"].values() for k in keys}) > 0


def test_a_key_that_was_not_warmed_is_seen(simulate: Simulate, version: str) -> None:
    seen = simulate(
        version,
        case="closure",
        families=["deepseek_v4"],
        hidden=[4096],
        every_up_to=40,
        max_tokens=40,
        forget_key="mhc_post_tilelang",
    )
    assert not is_closed(seen)
    ((kernel, key, tokens),) = seen["families"]["deepseek_v4 4096"]["serving_compiles"]
    assert (kernel, key, tokens) == ("mhc_post_tilelang", "((4, 4096, 128, 1024), ())", 1)


def test_gfx942_never_asks_for_tilelang(simulate: Simulate, version: str) -> None:
    seen = closure(simulate, version, "gfx942", True)
    assert seen["flags"]["HAS_TILELANG_MHC"] is False
    for each in seen["families"].values():
        assert each["warmed"] == [] and each["serving_compiles"] == []
        providers = {p for routes in each["routes"].values() for seen_by in routes.values() for p in seen_by}
        assert "aiter" in providers and "tilelang" not in providers


def test_the_drafts_own_key_is_warmed(simulate: Simulate, version: str) -> None:
    """V4.1's draft enters with four streams and no pre-mix; its target enters with the embedding."""
    if "deepseek_v41" not in families(version):
        pytest.skip("this vLLM has no DeepSeek-V4.1")
    seen = closure(simulate, version, "gfx950", False)
    for hidden in HIDDEN:
        asked = seen["families"][f"deepseek_v41 {hidden}"]["asked"]
        only_draft = set(asked["draft"]) - set(asked["target"])
        assert len(only_draft) == 1, only_draft
        (key,) = only_draft
        assert key.startswith(f"mhc_pre_big_fuse_tilelang({hidden}, ") and f"False, True, {4 * hidden}" in key
        assert key in seen["families"][f"deepseek_v41 {hidden}"]["warmed"]


def test_verify_and_draft_shapes_are_within_the_sweep() -> None:
    """k of 1 to 8: a verification step has (k + 1) tokens a request, a draft step k; 64 requests each."""
    shapes = {n * requests for k in range(1, 9) for n in (k, k + 1) for requests in range(1, 65)}
    assert max(shapes) <= EVERY_UP_TO
