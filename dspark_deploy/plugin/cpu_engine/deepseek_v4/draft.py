"""DSpark's draft of DeepSeek-V4 on a CPU, composed of vLLM's own classes.

vLLM's draft for XPU is torch and vLLM's platform-independent operators throughout, its loader included; what
is XPU's in it is the decoder layer, the kernel that stores the context, and an operator behind the layers.
Here it is built with the CPU's decoder layer, and those two are the CPU's. The confidence head, which XPU's
draft leaves out, is added.

Imported only by a worker that loads such a draft. Not covered: pipeline parallelism, expert scales of fp4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.qwen3_dspark import DSparkConfidenceHead
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.models.deepseek_v4.cpu.cpu_utils import map_local_to_global_slots_cpu
from vllm.models.deepseek_v4.cpu.model import DeepseekV4DecoderLayer
from vllm.models.deepseek_v4.xpu import dspark as xpu

CONFIDENCE = "confidence_head."


class BlockAttention(DeepseekV4CPUAttention):
    """Each token of a block sees the window of context before the block, and the whole block."""

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attention of `q` [T, heads, 512] into `output`; the keys, these tokens' too, are in the cache."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a profiling run
            output.zero_()
            return
        swa = metadata[self.swa_cache_layer.prefix]
        requests = swa.token_to_req_indices[: len(q)].long()
        end = swa.seq_lens.long()
        lengths = swa.query_start_loc[1 : len(end) + 1] - swa.query_start_loc[: len(end)]
        start = (end - lengths - self.window_size).clamp(min=0)
        keys = start[requests, None] + torch.arange(int((end - start).max()))
        keys = keys.masked_fill(keys >= end[requests, None], -1)
        slots = map_local_to_global_slots_cpu(keys, requests, swa.block_table, swa.block_size)
        cache = self.swa_cache_layer.kv_cache
        cache = cache.view(len(cache), -1)
        none = slots.new_full((len(q), 0), -1)
        torch.ops._C.flash_mla_with_kvcache_cpu(
            output, q, cache, slots, swa.block_size, cache, none, 1, self.attn_sink, self.scale
        )


class BlockLayer(DeepseekV4DecoderLayer):
    """vLLM's CPU decoder layer with `BlockAttention`. Its experts have no other form than the plain one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attn.__class__ = BlockAttention
        self.ffn.use_mega_moe = False


class DSparkDeepseekV4Model(xpu.DSparkDeepseekV4Model):
    """The stages. Never constructed: `DSparkDeepseekV4ForCausalLM` gives its model this class."""

    @torch.inference_mode()
    def precompute_and_store_context_kv(
        self,
        main_x: Tensor,
        context_positions: Tensor,
        context_slot_mappings: list[Tensor | None] | None = None,
    ) -> None:
        """Store what each stage attends to of the context: `main_x` [C, H] at positions [C], by its slots."""
        for layer, slots in zip(self.layers, context_slot_mappings or [None] * len(self.layers), strict=True):
            attn = layer.attn
            kv = attn.kv_norm(attn._fused_wqa_wkv_gemm(main_x)[..., attn.q_lora_rank :].contiguous())
            if slots is None:  # a profiling run
                continue
            cache = attn.swa_cache_layer.kv_cache
            no_query = kv.new_zeros(len(kv), attn.n_local_heads, attn.head_dim)
            ops.fused_qnorm_rope_kv_insert_cpu(
                no_query,
                kv,
                context_positions,
                cache.view(len(cache), -1),
                slots,
                attn.rotary_emb.cos_sin_cache,
                attn.padded_heads,
                attn.eps,
                attn.swa_cache_layer.block_size,
            )

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """Fill the blocks: [T] -> hidden states [T, H], before the norm."""
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        streams = embeds.unsqueeze(-2).repeat(1, self.hc_mult, 1)
        residual = post_mix = res_mix = None
        for layer in self.layers:
            streams, residual, post_mix, res_mix = layer(
                streams, positions, input_ids, post_mix, res_mix, residual
            )
        if self.layers[-1].use_fused_mhc:
            streams = self.layers[-1].hc_post(streams, residual, post_mix, res_mix)
        return self.hc_head_op(
            streams, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, self.rms_norm_eps, self.hc_eps
        )


class DSparkDeepseekV4ForCausalLM(xpu.DSparkDeepseekV4ForCausalLM):
    """The draft, as vLLM's DSpark speculator asks for it."""

    draft_id_to_target_id = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        with _layers_of(BlockLayer):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.__class__ = DSparkDeepseekV4Model
        config = self.config
        self.model.confidence_head = (
            DSparkConfidenceHead(
                config.hidden_size + config.dspark_markov_rank, prefix=f"{prefix}.confidence_head"
            )
            if getattr(config, "enable_confidence_head", True)
            else None
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the `mtp.*` weights by vLLM's own loader, and the confidence head, which that leaves out.

        Raises ValueError where the checkpoint lacks a weight of the stages.
        """
        found: dict[str, Tensor] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                if name.startswith("mtp.") and CONFIDENCE in name:
                    found[CONFIDENCE + name.partition(CONFIDENCE)[2]] = weight
                yield name, weight

        loaded: set[str] = super().load_weights(noted())
        if not found:
            self.model.confidence_head = None
        parameters = dict(self.named_parameters())
        for name, weight in found.items():
            if f"model.{name}" in parameters:
                default_weight_loader(parameters[f"model.{name}"], weight)
                loaded.add(f"model.{name}")
        shared = ("lm_head", "model.embed_tokens")  # the target's
        missing = sorted(name for name in parameters if name not in loaded and not name.startswith(shared))
        if missing:
            raise ValueError(f"the checkpoint lacks weights of its DSpark stages: {', '.join(missing[:5])}")
        return loaded

    def compute_confidence(self, head_hidden: Tensor, markov_embed: Tensor) -> Tensor:
        """Each drafted token's chance to be accepted. Raises RuntimeError without a confidence head."""
        if self.model.confidence_head is None:
            raise RuntimeError("adaptive verification needs a confidence head, and this checkpoint has none")
        return torch.sigmoid(self.model.confidence_head(head_hidden, markov_embed))

    def _finalize_moe(self) -> None:
        """Nothing to finalize: the CPU has no mega-MoE."""


@contextmanager
def _layers_of(layer: type) -> Iterator[None]:
    """Have vLLM's draft built of `layer`, which it finds by a name in its module."""
    before = xpu.DeepseekV4DecoderLayer
    xpu.DeepseekV4DecoderLayer = layer
    try:
        yield
    finally:
        xpu.DeepseekV4DecoderLayer = before
