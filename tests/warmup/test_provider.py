"""`mhc.provider`, SIMULATED: what was routed is read back from the operators of target and draft."""

from __future__ import annotations

from typing import Any

import pytest

from tests.warmup.conftest import Simulate

SMALL: dict[str, Any] = {"case": "closure", "hidden": [5120], "max_tokens": 40, "every_up_to": 40}


def routed(seen: dict[str, Any]) -> dict[str, set[str]]:
    """Providers by operator, over every model of every family."""
    found: dict[str, set[str]] = {}
    for each in seen["families"].values():
        assert any(name.startswith("draft.") for name in each["routes"])
        for operators in each["routes"].values():
            for operator, providers in operators.items():
                found.setdefault(operator, set()).update(providers)
    return found


def test_tilelang_holds_although_aiter_is_there(simulate: Simulate) -> None:
    found = routed(simulate("0.33.0", provider="tilelang", aiter=True, **SMALL))
    assert found.pop("hc_collapse_triton") == {"triton"}, "V4.1's sum of the streams is behind no provider"
    assert found and all(providers == {"tilelang"} for providers in found.values())


def test_aiter_leaves_no_tilelang(simulate: Simulate) -> None:
    found = routed(simulate("0.33.0", provider="aiter", aiter=True, **SMALL))
    assert all("tilelang" not in providers for providers in found.values())
    assert found["MHCPostOp"] == {"aiter"} and found["HCHeadOp"] == {"triton"}


def test_torch_is_the_reference_arm(simulate: Simulate, version: str) -> None:
    seen = simulate(version, provider="torch", case="native")
    assert not any(seen["flags"].values())
    for name, operators in seen["routes"].items():
        assert operators and all(list(p) == ["torch"] for p in operators.values()), (name, operators)


def test_without_the_patch_the_profiles_choice_does_not_hold(simulate: Simulate) -> None:
    seen = simulate("0.33.0", provider="torch", case="states", without=["vllm.model_executor.layers.mhc"])
    assert seen["flags"]["HAS_TILELANG_MHC"] is True


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"provider": "aiter"}, "HAS_AITER_MHC = False"),
        ({"provider": "tilelang", "arch": "gfx942"}, "architecture"),
    ],
)
def test_a_provider_that_is_not_there_stops_the_worker(
    simulate: Simulate, arguments: dict[str, str], reason: str
) -> None:
    failed = simulate("0.33.0", fails=True, **arguments, **SMALL)["failed"]
    assert "PatchRefusedError" in failed and reason in failed and "set mhc.provider: auto" in failed
