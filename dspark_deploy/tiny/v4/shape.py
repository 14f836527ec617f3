"""Sizes of the tiny DeepSeek-V4 and of its DSpark stages, and the config.json that they amount to.

    V4Shape().config()      # what transformers' DeepseekV4Config and vLLM read

What vLLM's cache layout fixes is a constant here: heads of 512, of which 64 are rotated. Standard library
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HEAD_SIZE, ROTATED = 512, 64
NORM_EPSILON = HC_EPSILON = 1e-6
COMPRESSION = 4
"""Tokens for each compressed entry, in a layer that has a compressor."""
SWIGLU_LIMIT = 10.0


@dataclass(frozen=True)
class V4Shape:
    """The target's sizes. `compression` holds one ratio a layer: 0 (sliding window only) or `COMPRESSION`."""

    compression: tuple[int, ...] = (0, COMPRESSION, 0)
    vocabulary: int = 352
    hidden: int = 128
    streams: int = 4
    sinkhorn: int = 20
    heads: int = 2
    query_rank: int = 64
    output_rank: int = 64
    experts: int = 4
    chosen: int = 2
    intermediate: int = 64
    routed_scale: float = 1.5
    window: int = 128
    index_heads: int = 64
    index_size: int = 128
    index_chosen: int = 512
    positions: int = 2048
    rope_theta: float = 10_000.0

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.compression)

    def config(self) -> dict[str, Any]:
        """The architecture by the names of config.json."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": HEAD_SIZE,
            "qk_rope_head_dim": ROTATED,
            "q_lora_rank": self.query_rank,
            "o_lora_rank": self.output_rank,
            "o_groups": 1,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "n_shared_experts": 1,
            "num_hash_layers": 0,
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "routed_scaling_factor": self.routed_scale,
            "swiglu_limit": SWIGLU_LIMIT,
            "hidden_act": "silu",
            "hc_mult": self.streams,
            "hc_sinkhorn_iters": self.sinkhorn,
            "hc_eps": HC_EPSILON,
            "rms_norm_eps": NORM_EPSILON,
            "sliding_window": self.window,
            "compress_ratios": list(self.compression),
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_size,
            "index_topk": self.index_chosen,
            "max_position_embeddings": self.positions,
            "rope_theta": self.rope_theta,
            "compress_rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }


@dataclass(frozen=True)
class V4DraftShape(V4Shape):
    """The DSpark stages' sizes, and how they are tied to the target. They have no compressor."""

    compression: tuple[int, ...] = (0,)
    block: int = 7
    markov_rank: int = 16
    target_layers: tuple[int, ...] = (0, 1, 2)
    mask_token: int = 2
