"""Patch states and the fused tail, SIMULATED: found by structure, refused on a changed source, taken out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.warmup.conftest import Simulate, families

DRAFT = "vllm.models.deepseek_v41.amd.dspark"
TAIL = "hidden_states = mhc_post_torch(hidden_states, residual, post_mix, res_mix)"


def states(simulate: Simulate, version: str, **asked: Any) -> dict[str, Any]:
    seen = simulate(version, case="closure", hidden=[[4096, 2]], runner=True, **asked)
    return {name: patch["state"] for name, patch in seen["patches"].items()}


def test_each_patch_is_in_its_state(simulate: Simulate, version: str) -> None:
    expected = {
        "amd-modules": "applied",
        "mhc-provider": "not applicable",
        "mhc-provider-collapse": "not applicable",
        "fused-post:deepseek_v4": "upstream",
        "capture-guard:tilelang": "applied",
        "capture-guard:triton": "applied",
        "mhc-warm-up": "applied",
        "jit-phases": "applied",
    }
    if "deepseek_v41" in families(version):
        expected["fused-post:deepseek_v41"] = "applied"
    assert states(simulate, version) == expected


def test_the_plugin_costs_less_than_50_ms(simulate: Simulate, version: str) -> None:
    seen = simulate(version, case="closure", hidden=[[4096, 2]], runner=True)
    assert sum(seen["milliseconds"].values()) < 50, seen["milliseconds"]


def test_the_process_report_carries_patches_and_compiles(simulate: Simulate, version: str) -> None:
    (report,) = simulate(version, case="closure", hidden=[[4096, 2]], runner=True)["reports"]
    assert {patch["name"] for patch in report["patches"]} >= {"amd-modules", "mhc-provider"}
    assert report["compiles"]["guard"] == "warn"


def post_key_asked_by_the_tail(simulate: Simulate, version: str, **asked: Any) -> bool:
    """Whether the draft's forward sends its tail to TileLang: one post more than its layers ask for."""
    seen = simulate(version, case="tail", **asked)
    return bool(seen["tail"]["keys"] == ["mhc_post_tilelang(4, 5120, 128, 1024)"])


@pytest.mark.parametrize("taken_out", [False, True], ids=["with the patch", "without it"])
def test_the_tail_asks_for_the_post_kernel(simulate: Simulate, version: str, taken_out: bool) -> None:
    if "deepseek_v41" not in families(version):
        pytest.skip("this vLLM has no DeepSeek-V4.1")
    without = [DRAFT] if taken_out else []
    assert post_key_asked_by_the_tail(simulate, version, without=without) is not taken_out


def test_the_fused_tail_equals_the_native_operator_bit_for_bit(simulate: Simulate, version: str) -> None:
    if "deepseek_v41" not in families(version):
        pytest.skip("this vLLM has no DeepSeek-V4.1")
    seen = simulate(version, provider="torch", case="native")
    found = seen["native"]["deepseek_v41"]
    assert found == {"finite": True, "shape": [5, 1024], "rebound": True, "equal": True}


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (f"mhc_post_torch(hidden_states, residual, post_mix, res_mix)\n        {TAIL}", "has 2 call(s)"),
        (TAIL.replace("post_mix, res_mix)", "post_mix, comb_res_mix=res_mix)"), "1 keywords"),
        ("hidden_states = residual.clone()", "calls neither"),
    ],
    ids=["called twice", "by keyword", "gone"],
)
def test_a_changed_source_is_refused(simulate: Simulate, new: str, reason: str) -> None:
    edit = {"module": DRAFT, "old": TAIL, "new": new}
    seen = simulate("0.33.0", case="states", edit=edit, families=["deepseek_v41"])
    found = seen["patches"]["fused-post:deepseek_v41"]
    assert found["state"] == "refused" and reason in found["detail"], found


def test_upstreams_own_fix_is_recognised(simulate: Simulate) -> None:
    edit = {"module": DRAFT, "old": TAIL, "new": TAIL.replace("mhc_post_torch", "layer.mhc_post")}
    seen = simulate("0.33.0", case="states", edit=edit, families=["deepseek_v41"])
    assert seen["patches"]["fused-post:deepseek_v41"]["state"] == "upstream"


def test_on_another_platform_nothing_is_watched_for(simulate: Simulate) -> None:
    seen = simulate("0.33.0", platform="cuda", case="states", families=["deepseek_v41"])
    assert seen["patches"] == {}
