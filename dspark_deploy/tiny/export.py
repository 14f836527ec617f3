"""Write a trained pair as folders that vLLM loads, `target/` and `draft/`, and read it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import nn

from dspark_deploy.tiny.layers import NORM_EPSILON, Shape
from dspark_deploy.tiny.model import TARGET_SHAPE, Draft, DraftShape, Target, round_to_bfloat16
from dspark_deploy.tiny.tokenizer import EOS, PAD, save_tokenizer


def write_pair(root: Path, target: Target, draft: Draft, tokenizer: Tokenizer) -> None:
    """Write `root`/target and `root`/draft."""
    write_target(root / "target", target, tokenizer)
    write_draft(root / "draft", draft, target, tokenizer)


def write_target(folder: Path, target: Target, tokenizer: Tokenizer) -> None:
    _write(folder, target, {"architectures": ["Qwen3ForCausalLM"], **_qwen3_config(target.shape)}, tokenizer)


def write_draft(folder: Path, draft: Draft, target: Target, tokenizer: Tokenizer) -> None:
    _write(folder, draft, draft_config(draft.shape, target.shape), tokenizer)


def read_pair(root: Path) -> tuple[Target, Draft, Tokenizer]:
    """The pair at `root`, which must have the shapes that this package trains, as it is served."""
    generator = torch.Generator()  # for weights that are overwritten at once
    target = Target(TARGET_SHAPE, generator)
    draft = Draft(DraftShape(), target, generator)
    for module, part in ((target, "target"), (draft, "draft")):
        module.load_state_dict(load_file(root / part / "model.safetensors"))
        round_to_bfloat16(module)
    return target, draft, Tokenizer.from_file(str(root / "target" / "tokenizer.json"))


def draft_config(shape: DraftShape, target_shape: Shape) -> dict[str, Any]:
    layers = list(shape.target_layers)
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_qwen3_config(shape),
        "num_target_layers": target_shape.layers,
        "block_size": shape.block,
        "mask_token_id": shape.mask_token,
        "target_layer_ids": layers,
        # Older vLLM looks for them here, and there only.
        "dflash_config": {"target_layer_ids": layers, "mask_token_id": shape.mask_token},
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def _qwen3_config(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # what transformers 4 calls it
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def _write(folder: Path, module: nn.Module, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in module.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    generation = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    save_tokenizer(tokenizer, folder)
