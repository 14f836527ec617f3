"""The DeepSeek-V4 training twin computes what transformers' DeepseekV4ForCausalLM computes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from dspark_deploy.tiny.v4.mhc import Sinkhorn
from dspark_deploy.tiny.v4.model import Draft, Target
from dspark_deploy.tiny.v4.shape import V4DraftShape, V4Shape

SHAPE = V4Shape(compression=(0, 4), hidden=32, window=8, index_heads=2)
LENGTH = 23  # longer than the window, and no multiple of the compressor's 4
BOUND = 1e-5  # fp32 against fp32, logits with a standard deviation of about 0.3


@pytest.fixture(scope="module")
def target() -> Target:
    generator = torch.Generator().manual_seed(0)
    target = Target(SHAPE, generator)
    for name, weight in target.named_parameters():
        if name.endswith(
            ("position_bias", "sinks", "norm.weight")
        ):  # all equal when drawn, which hides a mix-up
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.5, generator=generator)
    return target


@pytest.fixture
def tokens() -> Any:
    return torch.randint(3, SHAPE.vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def _as_transformers(target: Target) -> dict[str, Any]:
    """The same weights, with each layer's experts stacked."""
    weights = {name: value for name, value in target.state_dict().items() if ".mlp.experts." not in name}
    for number, layer in enumerate(target.model.layers):
        stacked = f"model.layers.{number}.mlp.experts"
        experts = list(layer.mlp.experts)
        both = [torch.cat([expert.gate_proj.weight, expert.up_proj.weight]) for expert in experts]
        weights[f"{stacked}.gate_up_proj"] = torch.stack(both)
        weights[f"{stacked}.down_proj"] = torch.stack([expert.down_proj.weight for expert in experts])
    return weights


@torch.no_grad()
def test_logits_are_those_of_transformers(target: Target, tokens: Any) -> None:
    config = transformers.DeepseekV4Config(**SHAPE.config())
    reference = transformers.DeepseekV4ForCausalLM(config).eval()
    reference.set_attn_implementation("eager")
    reference.load_state_dict(_as_transformers(target), strict=True)
    wanted = reference(tokens, use_cache=False).logits
    assert wanted.std() > 0.1
    assert (target(tokens) - wanted).abs().max() < BOUND


@torch.no_grad()
def test_a_later_token_changes_no_earlier_logits(target: Target, tokens: Any) -> None:
    changed = tokens.clone()
    changed[:, 16] = 5
    difference = (target(tokens) - target(changed)).abs().amax((0, 2))
    assert difference[:16].max() == 0
    assert difference[16:].max() > 0.01


def test_sinkhorn_has_the_gradient_of_its_formula() -> None:
    weights = torch.rand(4, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.1
    assert torch.autograd.gradcheck(lambda x: Sinkhorn.apply(x, 3), (weights.requires_grad_(),))


@torch.no_grad()
def test_a_block_sees_its_window_and_not_another_block(target: Target, tokens: Any) -> None:
    shape = V4DraftShape(hidden=32, window=8, target_layers=(0, 1), index_heads=2)
    draft = Draft(shape, target, torch.Generator().manual_seed(3))
    features = draft.features(target.layer_outputs(tokens))
    anchors = torch.tensor([[12, 18], [12, 18]])
    blocks = draft.blocks(features, anchors, tokens.gather(1, anchors), 4)
    alone = draft.blocks(features, anchors[:, :1], tokens[:, 12:13], 4)
    # Sums of another batch size round otherwise on some processors; a leak would be above 1e-3, as below.
    assert torch.allclose(blocks[:, :1], alone, atol=2e-5)
    features[:, :4] += 1.0  # before the window of anchor 12, which is 4 to 11
    assert torch.allclose(draft.blocks(features, anchors[:, :1], tokens[:, 12:13], 4), alone, atol=1e-6)
    features[:, 4] += 1.0
    assert not torch.allclose(draft.blocks(features, anchors[:, :1], tokens[:, 12:13], 4), alone, atol=1e-3)
