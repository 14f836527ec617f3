"""Torch versions of the kernels that vLLM's CPU build has for DeepSeek-V4 on AVX-512 only.

They are registered under the kernels' own names and schemas, so vLLM's code calls them as it stands. vLLM's
library is asked first: a name that it has is left alone.

Not covered: the indexer's query, which vLLM asks for only where more compressed entries exist than the
indexer keeps (512, so 2048 tokens). Shapes: T tokens, H heads, W keys in the window, C compressed keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark_deploy.plugin.cpu_engine.deepseek_v4 import cache
from dspark_deploy.plugin.cpu_engine.deepseek_v4.routing import biased_topk_cpu

NAMESPACE = "_C"


def convert_weight_packed(weight: Tensor) -> Tensor:
    """The weight as it is: only the kernels here read it."""
    return weight.clone()


def bmm_cpu(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    """out[g] = mat1[g] @ mat2[g].T: [G, T, K], [G, N, K] -> [G, T, N]."""
    out.copy_(torch.bmm(mat1, mat2.mT))


def fused_qnorm_rope_kv_insert_cpu(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    swa_kv_cache_2d: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    q_head_padded: int,
    eps: float,
    cache_block_size: int,
) -> Tensor:
    """Norm and rotate `q` [T, H, 512], and store `kv` [T, 512], rotated, in the cache."""
    stored = slot_mapping.shape[0]
    rows = cache.rotate(kv[:stored].float(), positions[:stored], cos_sin_cache)
    cache.write_rows(swa_kv_cache_2d, slot_mapping, rows, cache_block_size)
    normed = F.rms_norm(q.float(), (q.shape[-1],), None, eps)
    rotated = cache.rotate(normed, positions, cos_sin_cache).to(q.dtype)
    return F.pad(rotated, (0, 0, 0, q_head_padded - q.shape[1]))


def flash_mla_with_kvcache_cpu(
    out: Tensor,
    q: Tensor,
    window_cache_2d: Tensor,
    window_slots: Tensor,
    window_block_size: int,
    compressed_cache_2d: Tensor,
    compressed_slots: Tensor,
    compressed_block_size: int,
    attn_sink: Tensor,
    scale: float,
) -> None:
    """Attention of `q` [T, H, 512] over the rows at window_slots [T, W] and compressed_slots [T, C].

    A slot of -1 is no row. A row is key and value at once. The sink [H] takes its part of the softmax and
    gives nothing.
    """
    pieces = [
        _gathered(window_cache_2d, window_slots, window_block_size),
        _gathered(compressed_cache_2d, compressed_slots, compressed_block_size),
    ]
    rows = torch.cat([rows for rows, _ in pieces], 1)
    seen = torch.cat([seen for _, seen in pieces], 1)
    scores = torch.einsum("thd,tkd->thk", q.float(), rows) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    sinks = attn_sink[: q.shape[1]].float().view(1, -1, 1).expand(len(q), -1, -1)
    odds = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    out[:, : q.shape[1]] = torch.einsum("thk,tkd->thd", odds, rows).to(out.dtype)


def inverse_gptj_rope_o_proj_cpu(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, rope_dim: int
) -> Tensor:
    """Undo the rotation of the attention's output [T, H, 512]."""
    return cache.rotate(o.float(), positions[: len(o)], cos_sin_cache, back=True).to(o.dtype)


def save_partial_states_cpu(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, state_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Keep a compressor's inputs: values, and gates with the position bias added, by slot."""
    count, ratio = slot_mapping.shape[0], ape.shape[0]
    biased = score[:count] + ape[positions[:count] % ratio]
    used = slot_mapping >= 0
    slots, size = slot_mapping[used], state_cache.shape[1]
    state_cache[slots // size, slots % size] = torch.cat([kv[:count], biased], 1)[used].to(state_cache.dtype)


def compress_norm_rope_store_cpu(*arguments: Any) -> None:
    """Make the compressed entries that end at these tokens, and store them."""
    _compress(cache.write_rows, *arguments)


def compress_norm_rope_store_indexer_cpu(*arguments: Any) -> None:
    """The same for the indexer's entries of 128 channels."""
    _compress(cache.write_index_rows, *arguments)


_TABLE: tuple[tuple[Callable[..., Any], str], ...] = (
    (convert_weight_packed, "(Tensor weight) -> Tensor"),
    (bmm_cpu, "(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()"),
    (
        fused_qnorm_rope_kv_insert_cpu,
        "(Tensor q, Tensor kv, Tensor positions, Tensor(a!) swa_kv_cache_2d, Tensor slot_mapping, "
        "Tensor cos_sin_cache, int q_head_padded, float eps, int cache_block_size) -> Tensor",
    ),
    (
        flash_mla_with_kvcache_cpu,
        "(Tensor(a!) out, Tensor q, Tensor window_cache_2d, Tensor window_slots, int window_block_size, "
        "Tensor compressed_cache_2d, Tensor compressed_slots, int compressed_block_size, "
        "Tensor attn_sink, float scale) -> ()",
    ),
    (
        inverse_gptj_rope_o_proj_cpu,
        "(Tensor o, Tensor positions, Tensor cos_sin_cache, int rope_dim) -> Tensor",
    ),
    (
        save_partial_states_cpu,
        "(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) state_cache, "
        "Tensor slot_mapping) -> ()",
    ),
    *(
        (
            function,
            "(Tensor state_cache, Tensor gather_slots, Tensor positions, Tensor kv_slot_mapping, "
            "Tensor rms_norm_weight, float rms_norm_eps, Tensor cos_sin_cache, Tensor(a!) kv_cache_2d, "
            "int kv_cache_block_size, int compress_ratio) -> ()",
        )
        for function in (compress_norm_rope_store_cpu, compress_norm_rope_store_indexer_cpu)
    ),
    (
        biased_topk_cpu,
        "(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, int topk, "
        "bool renormalize, str scoring_func, int num_fused_shared_experts, "
        "float? routed_scaling_factor, bool apply_routed_scaling_factor_on_output) -> (Tensor, Tensor)",
    ),
)
KERNELS = {function.__name__: (f"{function.__name__}{schema}", function) for function, schema in _TABLE}
"""Schema and function by the kernel's name."""


def register(names: list[str]) -> torch.library.Library:
    """Define these kernels in vLLM's namespace. They live as long as the returned library."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name in names:
        schema, function = KERNELS[name]
        library.define(schema)
        library.impl(name, function, "CPU")
    return library


def missing() -> list[str]:
    """Those that vLLM's library does not have in this process."""
    return [name for name in KERNELS if not hasattr(torch.ops._C, name)]


def _gathered(rows: Tensor, slots: Tensor, rows_per_block: int) -> tuple[Tensor, Tensor]:
    """The rows at `slots` [T, K] as [T, K', 512], and which are in use; unused columns are left out."""
    slots = slots[:, (slots >= 0).any(0)]
    distinct, places = slots.clamp(min=0).unique(return_inverse=True)
    seen = slots >= 0
    # A row in no use may hold anything, NaN too, which no weight of nothing takes away.
    found = cache.read_rows(rows, distinct, rows_per_block)[places]
    return found.masked_fill(~seen.unsqueeze(-1), 0.0), seen


def _compress(
    write: Callable[[Tensor, Tensor, Tensor, int], None],
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    cos_sin_cache: Tensor,
    kv_cache_2d: Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
) -> None:
    """Entries [R, E] of the tokens at which a window of `compress_ratio` ends, gated over its states.

    A state is [values, gates], each as wide as an entry, or twice that where windows overlap: then the first
    half belongs to the window after, and the second to the token's own.
    """
    count, width = gather_slots.shape
    ends = ((positions[:count] + 1) % compress_ratio == 0) & (kv_slot_mapping[:count] >= 0)
    if not bool(ends.any()):
        return
    slots, size = gather_slots[ends], state_cache.shape[1]
    at = positions[:count][ends]
    known = slots.clamp(min=0)
    states = state_cache[known // size, known % size].float()
    values, gates = states.chunk(2, -1)
    if width > compress_ratio:
        values, gates = (_overlapped(part, compress_ratio) for part in (values, gates))
    weights = gates.masked_fill((slots < 0).unsqueeze(-1), float("-inf")).softmax(1)
    entries = (values.masked_fill((slots < 0).unsqueeze(-1), 0.0) * weights).sum(1)
    entries = F.rms_norm(entries, (entries.shape[-1],), rms_norm_weight, rms_norm_eps)
    entries = cache.rotate(entries, at // compress_ratio * compress_ratio, cos_sin_cache)
    write(kv_cache_2d, kv_slot_mapping[:count][ends], entries, kv_cache_block_size)


def _overlapped(states: Tensor, ratio: int) -> Tensor:
    """[R, 2 ratio, 2 E] -> [R, 2 ratio, E]."""
    half = states.shape[-1] // 2
    return torch.cat([states[:, :ratio, :half], states[:, ratio:, half:]], 1)
