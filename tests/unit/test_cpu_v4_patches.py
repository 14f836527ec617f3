"""DeepSeek-V4's patches of the CPU engine, on stand-ins for vLLM's modules: the state each ends in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dspark_deploy.plugin.cpu_engine.deepseek_v4 import experts, patches
from dspark_deploy.plugin.registry import State

LAYER_TYPES = {"swaonly", "c1a"}


def _scheduler(keys: Any, value: Any = None) -> Any:
    builder = SimpleNamespace(build_tile_scheduler=lambda _self, _tokens: dict.fromkeys(keys, value))
    return SimpleNamespace(**{patches.BUILDER: builder})


@pytest.fixture(autouse=True)
def _types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_layer_types", lambda: LAYER_TYPES)


@pytest.mark.parametrize(
    ("module", "state"),
    [
        (_scheduler({"swaonly"}), None),
        (_scheduler(LAYER_TYPES), State.UPSTREAM),
        (_scheduler({"swaonly"}, "a schedule"), State.REFUSED),
        (SimpleNamespace(), State.REFUSED),
    ],
    ids=["lacks a key", "has them", "schedules", "has no builder"],
)
def test_tile_scheduler(module: Any, state: State | None) -> None:
    assert patches._examine_scheduler(module).state == state
    if state is None:
        assert patches._install_scheduler(module) == "added c1a"
        found = getattr(module, patches.BUILDER).build_tile_scheduler(None, 3)
        assert found == {"swaonly": None, "c1a": None}


def _mhc(*without: str) -> Any:
    module = SimpleNamespace()
    for name in (*patches.MHC_OPERATORS, "HCHeadOp"):
        operator = type(name, (), {"forward_cpu": lambda _s: "C++", "forward_native": lambda _s: "torch"})
        if name not in without:
            setattr(module, name, operator)
    return module


@pytest.mark.parametrize(
    ("provider", "kernels", "state"),
    [
        ("auto", True, State.NOT_APPLICABLE),
        ("auto", False, None),
        ("torch", True, None),
        ("aiter", True, State.REFUSED),
        ("tilelang", False, State.REFUSED),
    ],
)
def test_provider(monkeypatch: pytest.MonkeyPatch, provider: str, kernels: bool, state: State | None) -> None:
    monkeypatch.setattr(patches, "_has_kernels", lambda _names: kernels)
    assert patches._examine_provider(_mhc(), provider).state == state


def test_provider_puts_torch_in_place_and_refuses_what_it_does_not_know() -> None:
    module = _mhc()
    patches._install_provider(module)
    assert [getattr(module, name)().forward_cpu() for name in patches.MHC_OPERATORS] == ["torch"] * 3
    assert module.HCHeadOp.forward_cpu.__module__ == "dspark_deploy.plugin.amd.provider"
    assert patches._examine_provider(_mhc("MHCPostOp"), "torch").state == State.REFUSED


def test_routing_keeps_vllms_kernel_for_the_counts_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def biased_topk_cpu(
        hidden_states: Any,
        gating_output: Any,
        correction_bias: Any,
        topk: int,
        renormalize: bool,
        scoring_func: str,
        num_fused_shared_experts: int,
        routed_scaling_factor: float | None,
        apply_routed_scaling_factor_on_output: bool,
    ) -> str:
        return "vLLM"

    module = SimpleNamespace(biased_topk_cpu=biased_topk_cpu)
    monkeypatch.setattr(patches, "_has_kernels", lambda _names: False)
    assert patches._examine_router(module).state == State.NOT_APPLICABLE
    monkeypatch.setattr(patches, "_has_kernels", lambda _names: True)
    assert patches._examine_router(module).state is None
    patches._install_router(module)
    rest = (True, "sqrtsoftplus", 0, 1.0, True)
    assert module.biased_topk_cpu(None, torch.zeros(1, 64), torch.zeros(64), 6, *rest) == "vLLM"
    weights, chosen = module.biased_topk_cpu(None, torch.zeros(1, 4), torch.tensor([0.0, 9, 0, 8]), 2, *rest)
    assert sorted(chosen[0].tolist()) == [1, 3] and weights.tolist() == [[0.5, 0.5]]
    assert patches._examine_router(SimpleNamespace(biased_topk_cpu=lambda x: x)).state == State.REFUSED


def test_a_draft_of_vllms_own_is_left_alone() -> None:
    own = type("DSparkDeepseekV4ForCausalLM", (), {"load_weights": lambda _s: None})
    assert patches._examine_draft(SimpleNamespace(**{patches.DRAFT: own})).state == State.UPSTREAM
    assert patches._examine_draft(SimpleNamespace()).state == State.REFUSED


class CPUUnquantizedExperts:
    """Stands for vLLM's: packs in place, computes without a limit."""

    def __init__(self, limit: float | None) -> None:
        self.moe_config = SimpleNamespace(swiglu_limit=limit)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.w13_weight.zero_()
        layer.w2_weight.zero_()

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any
    ) -> None:
        output.fill_(7.0)


def test_only_experts_with_a_limit_leave_vllms_kernel() -> None:
    copy = type("CPUUnquantizedExperts", (CPUUnquantizedExperts,), {})
    module: Any = SimpleNamespace(CPUUnquantizedExperts=copy)
    assert experts._examine(module).state is None
    experts._install(module)
    results = {}
    for limit in (None, 1.0):
        layer = SimpleNamespace(w13_weight=torch.ones(1, 4, 3), w2_weight=torch.ones(1, 3, 2))
        expert, output = copy(limit), torch.zeros(1, 3)
        expert.process_weights_after_loading(layer)
        assert not layer.w13_weight.any(), "vLLM's own preparation ran"
        arguments = torch.ones(1, 3), None, None, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
        expert.apply(output, *arguments)
        results[limit] = output[0, 0].item()
    silu_of_one = 1 / (1 + 2.718281828**-1)
    assert results[None] == 7.0 and abs(results[1.0] - 2 * silu_of_one) < 1e-6
