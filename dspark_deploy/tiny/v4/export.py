"""Write a trained DeepSeek-V4 as one folder that vLLM loads, target and draft in one file, and read it back.

Names are those of DeepSeek's own checkpoints: `layers.*` for the target, `mtp.*` for the DSpark stages. What
vLLM keeps in float32 (mHC, sinks, position biases, the router's bias) is so there; the rest is bfloat16.

    write_checkpoint(folder, target, draft, tokenizer)
    target, draft, tokenizer = read_checkpoint(folder)
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, nn

from dspark_deploy.tiny.tokenizer import EOS, PAD, save_tokenizer
from dspark_deploy.tiny.v4.model import Draft, Target
from dspark_deploy.tiny.v4.shape import V4DraftShape, V4Shape

FLOAT32 = ("_hc.", "hc_head.", "sinks", "position_bias", "e_score_correction_bias", "confidence_proj")
"""Parts of the names of what stays in float32."""

# In order: a later rule sees what an earlier one left.
_LAYER_NAMES = (
    (r"^self_attn\.compressor\.indexer\.scorer\.weights_proj\.", "attn.indexer.weights_proj."),
    (r"^self_attn\.compressor\.indexer\.q_b_proj\.", "attn.indexer.wq_b."),
    (r"^self_attn\.compressor\.indexer\.", "attn.indexer.compressor."),
    (r"^self_attn\.", "attn."),
    (r"compressor\.kv_proj\.", "compressor.wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"compressor\.position_bias$", "compressor.ape"),
    (r"^attn\.q_a_proj\.", "attn.wq_a."),
    (r"^attn\.q_b_proj\.", "attn.wq_b."),
    (r"^attn\.q_a_norm\.", "attn.q_norm."),
    (r"^attn\.kv_proj\.", "attn.wkv."),
    (r"^attn\.o_a_proj\.", "attn.wo_a."),
    (r"^attn\.o_b_proj\.", "attn.wo_b."),
    (r"^attn\.sinks$", "attn.attn_sink"),
    (r"^(attn|ffn)_hc\.(fn|base|scale)$", r"hc_\1_\2"),
    (r"^input_layernorm\.", "attn_norm."),
    (r"^post_attention_layernorm\.", "ffn_norm."),
    (r"^mlp\.gate\.e_score_correction_bias$", "ffn.gate.bias"),
    (r"^mlp\.", "ffn."),
    (r"(experts\.\d+|shared_experts)\.gate_proj\.", r"\1.w1."),
    (r"(experts\.\d+|shared_experts)\.down_proj\.", r"\1.w2."),
    (r"(experts\.\d+|shared_experts)\.up_proj\.", r"\1.w3."),
)
_TARGET_NAMES = {
    "lm_head.weight": "head.weight",
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
}
_DRAFT_NAMES = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_proj.weight": "confidence_head.proj.weight",
}


def checkpoint_name(name: str, stages: int = 0) -> str:
    """A parameter's name in the checkpoint; `stages` is the draft's count of them, 0 for the target."""
    root = f"mtp.{stages - 1}." if stages else ""  # what comes behind all stages lies in the last one
    plain = name.removeprefix("model.")
    if plain.startswith("layers."):
        _, number, rest = plain.split(".", 2)
        for pattern, replacement in _LAYER_NAMES:
            rest = re.sub(pattern, replacement, rest)
        return f"{'mtp' if stages else 'layers'}.{number}.{rest}"
    if plain.startswith("hc_head."):
        return root + plain.replace("hc_head.hc_", "hc_head_")
    if plain.startswith("main_"):
        return f"mtp.0.{plain}"  # what the first stage reads
    return root + (_DRAFT_NAMES.get(name, name) if stages else _TARGET_NAMES[name])


def as_served(module: nn.Module) -> None:
    """Give every parameter the value that it will have when served; it stays float32, and is frozen."""
    for name, weight in module.eval().requires_grad_(False).named_parameters():
        if not any(part in name for part in FLOAT32):
            weight.copy_(weight.to(torch.bfloat16))


def write_checkpoint(folder: Path, target: Target, draft: Draft, tokenizer: Tokenizer) -> None:
    """Write weights, configuration and tokenizer into `folder`, which may exist."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = len(draft.layers)
    weights = {checkpoint_name(name): _stored(name, value) for name, value in target.state_dict().items()}
    weights |= {
        checkpoint_name(name, stages): _stored(name, value) for name, value in draft.state_dict().items()
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    generation = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    config = checkpoint_config(target.shape, draft.shape)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    save_tokenizer(tokenizer, folder)


def read_checkpoint(folder: Path) -> tuple[Target, Draft, Tokenizer]:
    """The checkpoint at `folder`, which must have the shapes that this package trains, as it is served."""
    generator = torch.Generator()  # for weights that are overwritten at once
    target = Target(V4Shape(), generator)
    draft = Draft(V4DraftShape(), target, generator)
    stored = load_file(folder / "model.safetensors")
    modules: list[tuple[nn.Module, int]] = [(target, 0), (draft, len(draft.layers))]
    for module, stages in modules:
        values = {name: stored[checkpoint_name(name, stages)].float() for name in module.state_dict()}
        module.load_state_dict(values)
        as_served(module)
    return target, draft, Tokenizer.from_file(str(folder / "tokenizer.json"))


def checkpoint_config(shape: V4Shape, draft: V4DraftShape) -> dict[str, Any]:
    """What config.json holds: the architecture, and the draft's part in it."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # what transformers 4 calls it
        **shape.config(),
        "topk_method": "noaux_tc",
        "rope_scaling": {"rope_type": "default"},
        # A ratio for each DSpark stage as well, as in DeepSeek's own configurations.
        "compress_ratios": [*shape.compression, *draft.compression],
        "num_nextn_predict_layers": len(draft.compression),
        "n_mtp_layers": len(draft.compression),
        "dspark_block_size": draft.block,
        "dspark_noise_token_id": draft.mask_token,
        "dspark_target_layer_ids": list(draft.target_layers),
        "dspark_markov_rank": draft.markov_rank,
    }


def _stored(name: str, value: Tensor) -> Tensor:
    keeps = any(part in name for part in FLOAT32)
    return value.to(torch.float32 if keeps else torch.bfloat16).contiguous().clone()
