"""Twins of the kernels that book a step's outcome into the request states.

Contracts are those of `vllm.v1.worker.gpu.input_batch` and `spec_decode.rejection_sampler`. Shapes: R
requests in the batch, N request slots, L rows of logits. One-dimensional tensors are contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dspark_deploy.plugin.cpu_engine.twins.arrays import flat, gaps, segments


def get_num_sampled_and_rejected(
    grid: tuple[int, ...],
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    **_options: Any,
) -> None:
    """How many drafts were rejected; a request that is still in its prefill sampled and rejected none.

    grid is (R,). Reads int32 seq_lens [R], cu_num_logits [R + 1], prefill lengths [N], int64 slots [R].
    Writes num_sampled[:R] in place and num_rejected[:R], both int32.
    """
    requests = grid[0]
    sampled, rejected = flat(num_sampled_ptr)[:requests], flat(num_rejected_ptr)[:requests]
    prefill = flat(prefill_len_ptr)[flat(idx_mapping_ptr)[:requests]]
    chunked = flat(seq_lens_ptr)[:requests] < prefill
    sampled[chunked] = 0
    np.subtract(gaps(flat(cu_num_logits_ptr)[: requests + 1]), sampled, out=rejected)
    rejected[chunked] = 0


def post_update(
    grid: tuple[int, ...],
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    **_options: Any,
) -> None:
    """Append the sampled tokens to their requests and advance the counts.

    grid is (R,). Reads int64 slots [R] (negative: skip; otherwise distinct), int64 sampled [R, k + 1],
    int32 num_sampled and num_rejected [R], int32 query_start_loc [R + 1] or None. For each request writes
    int32 all_token_ids[slot, total:total + num_sampled], adds to int32 total_len[slot], sets int64
    last_sampled[slot] if anything was sampled, counts the tokens in int32 output_bin_counts[slot] unless
    None, and adds query length - num_rejected to int32 num_computed_tokens[slot].
    """
    requests = grid[0]
    counts = num_sampled_ptr.tolist()
    advance = -flat(num_rejected_ptr)[:requests]
    if query_start_loc_ptr is not None:
        advance += gaps(flat(query_start_loc_ptr)[: requests + 1])
    computed, total, last = (
        flat(x) for x in (num_computed_tokens_ptr, total_len_ptr, last_sampled_tokens_ptr)
    )
    sampled, ids = sampled_tokens_ptr.numpy(), flat(all_token_ids_ptr)
    bins = None if output_bin_counts_ptr is None else flat(output_bin_counts_ptr)
    # A loop, at some 3 µs a request, is faster than array code for the few requests that a CPU serves.
    for request, slot in enumerate(idx_mapping_ptr.tolist()[:requests]):
        if slot < 0:
            continue
        computed[slot] += advance[request]
        count = counts[request]
        if count <= 0:
            continue
        tokens = sampled[request, :count]
        start = slot * all_token_ids_stride + int(total[slot])
        ids[start : start + count] = tokens
        total[slot] += count
        last[slot] = tokens[-1]
        if bins is not None:
            for token in tokens.tolist():
                bins[slot * output_bin_counts_stride + token] += 1


def gather_draft_sampled(
    grid: tuple[int, ...],
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
    **_options: Any,
) -> None:
    """The input token and the position of each row of logits; -1 for a draft that stands in the prefill.

    Reads int64 logits_indices, int64 slots and int32 places [L], int32 input_ids and int64 positions over
    the batch's tokens, int32 prefill lengths [N]. Writes int32 draft_sampled[:L] and int64 pos[:L].
    """
    rows = flat(logits_indices_ptr)[:num_logits]
    position = flat(positions_ptr)[rows]
    place = flat(expanded_local_pos_ptr)[:num_logits]
    prefill = flat(prefill_len_ptr)[flat(expanded_idx_mapping_ptr)[:num_logits]]
    placeholder = (place > 0) & (position - place < prefill)
    flat(draft_sampled_ptr)[:num_logits] = np.where(placeholder, -1, flat(input_ids_ptr)[rows])
    flat(pos_ptr)[:num_logits] = position


def flatten_sampled(
    grid: tuple[int, ...],
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    **_options: Any,
) -> None:
    """Lay the sampled tokens out by row of logits.

    grid is (R,). Reads int64 sampled [R, k + 1], int32 num_sampled [R] and cu_num_logits [R + 1]. Writes
    int64 flat_sampled[cu_num_logits[r]:][:num_sampled[r]]; the other rows are untouched.
    """
    owner, place = segments(flat(num_sampled_ptr)[: grid[0]])
    tokens = sampled_ptr.numpy()[owner, place]
    flat(flat_sampled_ptr)[flat(cu_num_logits_ptr)[owner] + place] = tokens
