"""Twins of the kernels that prepare a verification: softmax statistics, joint ratios, residual masses.

Contracts are those of `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils`. Shapes: R requests, L rows
of logits, V tokens, N request slots, k draft tokens, B = ceil(V / BLOCK_SIZE) blocks of the vocabulary.
Target logits are float32, bfloat16 or float16 [L, V], already divided by the temperature; draft logits, of
the same dtypes, are [N, k, V] and are not. Slots are int64, cu_num_logits int32 [R + 1], temperatures
float32 [N]. A request's last row of logits is its bonus row; temperature 0 makes a request greedy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dspark_deploy.plugin.cpu_engine.twins.arrays import Array, flat, floats, gaps, next_power_of_2, segments
from dspark_deploy.plugin.cpu_engine.twins.sampling import block_argmax

# NumPy adds long runs in blocks of 128 values and joins them pairwise. Zeros behind a row leave every
# partial sum as it is as long as the row's length is a power of two that covers such a block.
_PAIRWISE_BLOCK = 128


def local_logits_stats(
    grid: tuple[int, ...],
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    **_options: Any,
) -> None:
    """Maximum and sum of exponentials by block, of the target and of the draft.

    grid is (L, B). Reads int32 places expanded_local_pos [L]. For rows with a place below k: of greedy ones
    writes int64 target_local_argmax and float32 target_local_max [L, B]; of the others float32 max and
    sumexp [L, B] of the target and, with HAS_DRAFT_LOGITS, of the draft over its temperature. Everything
    else, bonus rows among it, is untouched.
    """
    places = flat(expanded_local_pos_ptr)[: grid[0]]
    slots = flat(expanded_idx_mapping_ptr)[: grid[0]]
    scale = flat(temp_ptr)[slots]
    verified = places < num_speculative_steps
    target = floats(target_logits_ptr)
    random = scale.any()
    greedy = np.flatnonzero(verified & (scale == 0.0) if random else verified)
    if len(greedy):
        best, value = block_argmax(target[greedy, :vocab_size], BLOCK_SIZE)
        target_local_argmax_ptr.numpy()[greedy] = best
        target_local_max_ptr.numpy()[greedy] = value
    if not random:
        return
    sampled = np.flatnonzero(verified & (scale != 0.0))
    if not len(sampled):
        return
    top, mass = _max_and_sumexp(target[sampled, :vocab_size], BLOCK_SIZE)
    target_local_max_ptr.numpy()[sampled] = top
    target_local_sumexp_ptr.numpy()[sampled] = mass
    if HAS_DRAFT_LOGITS:
        assert draft_logits_ptr is not None
        draft = scaled_draft(draft_logits_ptr, slots[sampled], places[sampled], scale[sampled], vocab_size)
        top, mass = _max_and_sumexp(draft, BLOCK_SIZE)
        draft_local_max_ptr.numpy()[sampled] = top
        draft_local_sumexp_ptr.numpy()[sampled] = mass


def cumulative_log_p(
    grid: tuple[int, ...],
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    **_options: Any,
) -> None:
    """The running joint ratio of block verification, log min(p_{i-1} M_b / M_s, 1), clipped at each token.

    grid is (R,). Reads int32 or int64 draft_sampled [L], whose row i + 1 holds the token drafted at row i;
    -1 carries the ratio on. Writes float32 cumulative_log_p [L] for the draft rows of requests that sample.
    """
    requests = grid[0]
    slots = flat(idx_mapping_ptr)[:requests]
    bounds = flat(cu_num_logits_ptr)[: requests + 1].astype(np.int64)
    scale = flat(temp_ptr)[slots]
    drafts = np.where(scale == 0.0, 0, gaps(bounds) - 1)
    owner, place = segments(drafts)
    if not len(owner):
        return
    rows = bounds[owner] + place
    tokens = flat(draft_sampled_ptr)[rows + 1].astype(np.int64)
    known = tokens >= 0
    target, draft, _, _ = log_probabilities(
        rows, np.maximum(tokens, 0), slots[owner], place, scale[owner],
        target_logits_ptr, target_local_max_ptr, target_local_sumexp_ptr,
        draft_logits_ptr if HAS_DRAFT_LOGITS else None, draft_local_max_ptr, draft_local_sumexp_ptr,
        PADDED_VOCAB_NUM_BLOCKS,
    )  # fmt: skip
    with np.errstate(all="ignore"):  # a token that the draft excludes has log probability -inf
        ratio = target - draft
    log_p = np.zeros(requests, dtype=np.float32)
    out = flat(cumulative_log_p_ptr)
    for step in range(int(drafts.max())):
        here = np.flatnonzero(place == step)
        request = owner[here]
        before = log_p[request]
        log_p[request] = np.where(known[here], np.fmin(before + ratio[here], np.float32(0.0)), before)
        out[rows[here]] = log_p[request]


def local_residual_mass(
    grid: tuple[int, ...],
    local_residual_mass_ptr: torch.Tensor,
    local_residual_mass_stride: int,
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_logits_ptr: torch.Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    vocab_num_blocks: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    **_options: Any,
) -> None:
    """Block verification's residual mass, sum of max(p_i M_b - M_s, 0), by block of the vocabulary.

    grid is (L, B). Writes float32 local_residual_mass [L, B] for the rows of requests that sample whose
    place is from 1 to k - 1 and whose drafted token (row i + 1 of draft_sampled) isn't -1; no other row.
    """
    rows_total = grid[0]
    places = flat(expanded_local_pos_ptr)[:rows_total]
    slots = flat(expanded_idx_mapping_ptr)[:rows_total]
    scale = flat(temp_ptr)[slots]
    needed = (places > 0) & (places < num_speculative_steps) & (scale != 0.0)
    needed[:-1] &= flat(draft_sampled_ptr)[1:rows_total] >= 0
    needed[-1] = False
    rows = np.flatnonzero(needed)
    if not len(rows):
        return
    target_lse = global_logsumexp(
        target_local_max_ptr, target_local_sumexp_ptr, rows, PADDED_VOCAB_NUM_BLOCKS
    )
    draft_lse = global_logsumexp(draft_local_max_ptr, draft_local_sumexp_ptr, rows, PADDED_VOCAB_NUM_BLOCKS)
    draft = scaled_draft(draft_logits_ptr, slots[rows], places[rows], scale[rows], vocab_size)
    with np.errstate(all="ignore"):  # -inf logits are legal
        big = np.exp(floats(target_logits_ptr)[rows, :vocab_size] - target_lse[:, None])
        small = np.exp(draft - draft_lse[:, None])
        joint = np.exp(flat(cumulative_log_p_ptr)[rows - 1])
        excess = np.fmax(joint[:, None] * big - small, np.float32(0.0))
    local_residual_mass_ptr.numpy()[rows] = _blocks(excess, BLOCK_SIZE, 0.0).sum(axis=-1)


def scaled_draft(
    draft_logits: torch.Tensor, slots: Array, places: Array, scale: Array, vocab_size: int
) -> Array:
    """Draft logits of the rows given by slot and place, over their temperatures: float32 [n, V]."""
    chosen = draft_logits[torch.from_numpy(slots), torch.from_numpy(places.astype(np.int64)), :vocab_size]
    return floats(chosen) / scale[:, None]


def global_logsumexp(maxima: torch.Tensor, sums: torch.Tensor, rows: Array, padded_blocks: int) -> Array:
    """Join the statistics of the blocks of each row: float32 [n]."""
    top, mass = maxima.numpy()[rows], sums.numpy()[rows]
    if padded_blocks != top.shape[1]:
        room = ((0, 0), (0, padded_blocks - top.shape[1]))
        top, mass = np.pad(top, room, constant_values=-np.inf), np.pad(mass, room)
    with np.errstate(all="ignore"):
        highest = np.fmax.reduce(top, axis=-1)
        return highest + np.log((mass * np.exp(top - highest[:, None])).sum(axis=-1))


def log_probabilities(
    rows: Array,
    tokens: Array,
    slots: Array,
    places: Array,
    scale: Array,
    target_logits: torch.Tensor,
    target_max: torch.Tensor,
    target_sumexp: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_max: torch.Tensor,
    draft_sumexp: torch.Tensor,
    padded_blocks: int,
) -> tuple[Array, Array, Array, Array]:
    """Log probability of one token in each row: target, draft, and the logsumexp of each; float32 [n].

    Without draft logits the draft is certain of its token: its log probability and logsumexp are 0.
    """
    target_lse = global_logsumexp(target_max, target_sumexp, rows, padded_blocks)
    target = floats(target_logits)[rows, tokens] - target_lse
    if draft_logits is None:
        certain = np.zeros_like(target)
        return target, certain, target_lse, certain
    draft_lse = global_logsumexp(draft_max, draft_sumexp, rows, padded_blocks)
    chosen = draft_logits[torch.from_numpy(slots), torch.from_numpy(places), torch.from_numpy(tokens)]
    return target, floats(chosen) / scale - draft_lse, target_lse, draft_lse


def _blocks(values: Array, block_size: int, filler: float) -> Array:
    """[n, V] as [n, B, width], padded so that a sum over a block rounds as over `block_size` values."""
    rows, vocab = values.shape
    blocks = -(-vocab // block_size)
    width = block_size if blocks > 1 else min(block_size, max(_PAIRWISE_BLOCK, next_power_of_2(vocab)))
    if blocks * width != vocab:
        padded = np.full((rows, blocks * width), filler, dtype=values.dtype)
        padded[:, :vocab] = values
        values = padded
    return values.reshape(rows, blocks, width)


def _max_and_sumexp(logits: Array, block_size: int) -> tuple[Array, Array]:
    by_block = _blocks(logits, block_size, -np.inf)
    with np.errstate(all="ignore"):  # a block of -inf has no exponentials to add
        top = np.fmax.reduce(by_block, axis=-1)
        mass = np.exp(by_block - top[..., None]).sum(axis=-1)
    return top, np.where(top > -np.inf, mass, np.float32(0.0))
