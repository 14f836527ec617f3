"""The training modules compute what the served models compute, under the names that vLLM loads."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors import safe_open

from dspark_deploy.tiny.checkpoint import checkpoint_path
from dspark_deploy.tiny.export import read_pair
from dspark_deploy.tiny.model import DraftShape

SHAPE = DraftShape()
TARGET, DRAFT, TOKENIZER = read_pair(checkpoint_path("tiny-qwen3/target").parent)
LENGTH, ANCHORS = 30, torch.tensor([[4, 11, 20], [7, 8, 29]])


@pytest.fixture
def tokens() -> Any:
    return torch.randint(3, SHAPE.vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def context(tokens: Any) -> Any:
    return DRAFT.features(TARGET.layer_outputs(tokens))


def _blocks(context: Any, tokens: Any, anchors: Any, length: int, kept: Any = None) -> Any:
    return DRAFT.blocks(context, anchors, tokens.gather(1, anchors), length, kept)


def _promised(config: dict[str, Any]) -> dict[str, list[int]]:
    """The weights of the layers that a Qwen3 config describes, without what is in front of "layers"."""
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": [query, hidden],
        "self_attn.k_proj": [key, hidden],
        "self_attn.v_proj": [key, hidden],
        "self_attn.o_proj": [hidden, query],
        "self_attn.q_norm": [head],
        "self_attn.k_norm": [head],
        "mlp.gate_proj": [wide, hidden],
        "mlp.up_proj": [wide, hidden],
        "mlp.down_proj": [hidden, wide],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    names = {
        f"layers.{number}.{name}.weight": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    return {**names, "norm.weight": [hidden]}


def _shipped(part: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    folder = checkpoint_path(f"tiny-qwen3/{part}")
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        assert {weights.get_dtype() for weights in slices.values()} == {"BF16"}
        shapes = {name: list(weights.get_shape()) for name, weights in slices.items()}
    return json.loads((folder / "config.json").read_text()), shapes


def test_target_holds_what_its_config_promises() -> None:
    config, shapes = _shipped("target")
    table = [config["vocab_size"], config["hidden_size"]]
    promised = {f"model.{name}": shape for name, shape in _promised(config).items()}
    assert shapes == {**promised, "model.embed_tokens.weight": table, "lm_head.weight": table}
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_draft_holds_what_its_config_promises_and_neither_embedding_nor_head() -> None:
    config, shapes = _shipped("draft")
    hidden, rank, vocabulary = config["hidden_size"], config["markov_rank"], config["vocab_size"]
    assert shapes == {
        **_promised(config),
        "fc.weight": [hidden, len(config["target_layer_ids"]) * hidden],
        "hidden_norm.weight": [hidden],
        "markov_head.markov_w1.weight": [vocabulary, rank],
        "markov_head.markov_w2.weight": [vocabulary, rank],
        "confidence_head.proj.weight": [1, hidden + rank],
        "confidence_head.proj.bias": [1],
    }
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["block_size"] == 7
    assert config["target_layer_ids"] == config["dflash_config"]["target_layer_ids"]
    assert max(config["target_layer_ids"]) < config["num_target_layers"]


def test_target_gives_the_logits_of_transformers(tokens: Any) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3")
    served = qwen3.Qwen3ForCausalLM.from_pretrained(checkpoint_path("tiny-qwen3/target"), dtype=torch.float32)
    with torch.no_grad():
        expected = served(tokens, output_hidden_states=True)
        outputs = TARGET.layer_outputs(tokens)
    assert torch.allclose(TARGET.logits(outputs[-1]), expected.logits, atol=1e-3, rtol=1e-4)
    # transformers gives the embeddings first, and the last layer's output only after the norm.
    for ours, theirs in zip(outputs[:-1], expected.hidden_states[1:-1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 5, 7])
def test_draft_shapes(context: Any, tokens: Any, length: int) -> None:
    hidden = _blocks(context, tokens, ANCHORS, length)
    previous = torch.zeros(2, 3, length, dtype=torch.long)
    assert context.shape == (2, LENGTH, 3 * SHAPE.hidden)
    assert hidden.shape == (2, 3, length, SHAPE.hidden)
    assert DRAFT.logits(hidden, previous).shape == (2, 3, length, SHAPE.vocabulary)
    assert DRAFT.confidence(hidden, previous).shape == (2, 3, length)


@pytest.mark.parametrize("kept", [1, 2, 6])
def test_a_block_cut_short_is_a_short_block(context: Any, tokens: Any, kept: int) -> None:
    cut = _blocks(context, tokens, ANCHORS, 7, torch.full_like(ANCHORS, kept))[:, :, :kept]
    assert torch.allclose(cut, _blocks(context, tokens, ANCHORS, kept), atol=1e-4)
    assert not torch.allclose(cut, _blocks(context, tokens, ANCHORS, 7)[:, :, :kept], atol=1e-2)


def test_blocks_do_not_see_each_other(context: Any, tokens: Any) -> None:
    together = _blocks(context, tokens, ANCHORS, 5)
    for index in range(ANCHORS.shape[1]):
        alone = _blocks(context, tokens, ANCHORS[:, index : index + 1], 5)
        assert torch.allclose(together[:, index : index + 1], alone, atol=1e-4)


@pytest.mark.parametrize(("position", "seen"), [(10, True), (11, False), (25, False)])
def test_a_block_sees_the_context_before_its_anchor_only(
    context: Any, tokens: Any, position: int, seen: bool
) -> None:
    anchors = torch.tensor([[11], [11]])
    changed = context.clone()
    changed[:, position] += 5
    same = torch.allclose(
        _blocks(context, tokens, anchors, 5), _blocks(changed, tokens, anchors, 5), atol=1e-5
    )
    assert same is not seen


def test_markov_head_makes_logits_depend_on_the_token_before(context: Any, tokens: Any) -> None:
    hidden = _blocks(context, tokens, ANCHORS, 1)
    one, other = (DRAFT.logits(hidden, torch.full((2, 3, 1), token)) for token in (20, 21))
    weights = DRAFT.markov_head
    difference = weights["markov_w2"].weight @ (
        weights["markov_w1"].weight[20] - weights["markov_w1"].weight[21]
    )
    assert torch.allclose(one - other, difference.expand_as(one), atol=1e-3)
    assert difference.abs().max() > 0.1
