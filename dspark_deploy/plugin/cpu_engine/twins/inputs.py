"""Twins of the kernels that lay out a step's inputs: tokens, positions, rows of logits.

Contracts are those of `vllm.v1.worker.gpu.input_batch`. Shapes: R requests in the batch, N request slots,
L rows of logits, k draft tokens. One-dimensional tensors are contiguous; query_start_loc and cu_num_logits
are int32 [R + 1] and non-decreasing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dspark_deploy.plugin.cpu_engine.twins.arrays import flat, gaps, segments


def prepare_prefill_inputs(
    grid: tuple[int, ...],
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
    **_options: Any,
) -> None:
    """Copy the tokens that requests still in their prefill compute in this step, and the ones after.

    grid is (R,). Reads int64 slots [R], int32 prefill lengths and computed counts [N], int32 all_token_ids
    [N, length]. Writes input_ids (int32) over each prefilling request's query, and next_prefill_tokens
    (int32 [lookahead, N]) in its column, 0 past the prefill. Requests past their prefill are untouched.
    """
    requests = grid[0]
    slots = flat(idx_mapping_ptr)[:requests]
    computed, prefill = flat(num_computed_tokens_ptr)[slots], flat(prefill_lens_ptr)[slots]
    bounds = flat(query_start_loc_ptr)
    tokens, ids = flat(all_token_ids_ptr), flat(input_ids_ptr)
    ahead = flat(next_prefill_tokens_ptr)
    for request in np.flatnonzero(computed < prefill).tolist():
        slot = int(slots[request])
        start, end = int(bounds[request]), int(bounds[request + 1])
        base = slot * all_token_ids_stride
        done = int(computed[request]) + end - start
        ids[start:end] = tokens[base + done - (end - start) : base + done]
        for offset in range(num_lookahead):
            known = done + offset < prefill[request]
            ahead[offset * next_prefill_tokens_stride + slot] = tokens[base + done + offset] if known else 0


def prepare_pos_seq_lens(
    grid: tuple[int, ...],
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    **_options: Any,
) -> None:
    """Positions of the scheduled tokens, and each sequence's length after the step.

    grid is (R + 1,). Reads int64 slots [R] and int32 computed counts [N]. Writes int64 positions over the
    batch's queries, int32 seq_lens[:R], and 0 in seq_lens[R:max_num_reqs]; other positions are untouched.
    """
    requests = grid[0] - 1
    lengths = flat(seq_lens_ptr)
    lengths[requests:max_num_reqs] = 0
    bounds = flat(query_start_loc_ptr)[: requests + 1]
    computed = flat(num_computed_tokens_ptr)[flat(idx_mapping_ptr)[:requests]]
    queries = gaps(bounds)
    np.add(computed, queries, out=lengths[:requests])
    owner, place = segments(queries)
    flat(pos_ptr)[bounds[0] : bounds[requests]] = computed[owner] + place


def combine_sampled_and_draft_tokens(
    grid: tuple[int, ...],
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_options: Any,
) -> None:
    """Put the last sampled token and the drafts into the queries; say which rows yield logits.

    grid is (R,). Reads int64 slots [R], int32 seq_lens [R], int32 prefill lengths [N], int64 last sampled
    tokens [N, 1], int64 drafts [N, k]. A request has cu_num_logits[r+1] - cu_num_logits[r] <= k + 1 rows of
    logits, the last rows of its query. Writes int64 logits_indices [L]; and in input_ids (int32) the drafts
    of requests past their prefill, and the token before them where it isn't part of the prompt.
    """
    requests = grid[0]
    cumulative, query_starts = cu_num_logits_ptr.tolist(), query_start_loc_ptr.tolist()
    lengths, prefill = seq_lens_ptr.tolist(), flat(prefill_len_ptr)
    last_sampled, drafts = flat(last_sampled_tokens_ptr), draft_tokens_ptr.numpy()
    ids, indices = flat(input_ids_ptr), flat(logits_indices_ptr)
    # A loop, at some 3 µs a request, is faster than array code for the few requests that a CPU serves.
    for request, slot in enumerate(idx_mapping_ptr.tolist()[:requests]):
        first, end = cumulative[request], query_starts[request + 1]
        rows = cumulative[request + 1] - first
        start = end - rows
        indices[first : first + rows] = np.arange(start, end)
        if lengths[request] <= prefill[slot]:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and lengths[request] - rows >= prefill[slot]:
            ids[start] = last_sampled[slot]
        count = rows - NUM_NEW_SAMPLED_TOKENS
        if count > 0:
            ids[end - count : end] = drafts[slot, :count]


def expand_idx_mapping(
    grid: tuple[int, ...],
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    **_options: Any,
) -> None:
    """Give each row of logits its request's slot and its place in the request.

    grid is (R,). Reads int64 slots [R]. Writes expanded_idx_mapping (int64 [L]) and expanded_local_pos
    (int32 [L]) from cu_num_logits[0] up to cu_num_logits[R].
    """
    requests = grid[0]
    cumulative = flat(cu_num_logits_ptr)[: requests + 1]
    owner, place = segments(gaps(cumulative))
    first, last = cumulative[0], cumulative[requests]
    flat(expanded_idx_mapping_ptr)[first:last] = flat(idx_mapping_ptr)[owner]
    flat(expanded_local_pos_ptr)[first:last] = place
