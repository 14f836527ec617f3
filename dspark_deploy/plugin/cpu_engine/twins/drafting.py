"""Twin of the kernel that lays out DSpark's (and DFlash's) draft step.

The contract is that of `vllm.v1.worker.gpu.spec_decode.dflash.speculator`. Shapes: R requests in the batch,
N request slots, Q query tokens a request, k draft tokens, T tokens of the target's batch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from dspark_deploy.plugin.cpu_engine.twins.arrays import Array, flat, gaps, segments
from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED


def prepare_dflash_inputs(
    grid: tuple[int, ...],
    out_input_ids_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor,
    out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor,
    out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    **_options: Any,
) -> object:
    """Lay out the context that the target has just computed and the block of queries after it.

    grid is (R, blocks). Reads, of the target's batch: int64 positions [T], int32 query_start_loc [R + 1],
    int64 slots [R], int32 num_sampled and num_rejected [R]; int64 last_sampled and int32
    next_prefill_tokens [N]; float32 temperature and int64 seeds [N]; int32 block_table [R, stride].

    Writes for the context, over the target's tokens, int64 positions and slots: of a rejected token 0 and
    PAD_SLOT_ID, and PAD_SLOT_ID too where the block is the null block 0. Writes for the queries, Q a
    request: int32 input_ids (the bonus token, then the mask token), int64 positions, clamped to the model's
    length, and int64 slots. Writes int32 query_start_loc [max_num_reqs + 1] and seq_lens [max_num_reqs],
    int64 sample_indices, sample_pos and sample_idx_mapping [max_num_reqs * k], and slots up to
    max_num_tokens, all with their padding; and the batch's rows of temperature and seeds. Declines context
    parallelism, and a query that yields another number of samples than k.
    """
    skipped = 0 if SAMPLE_FROM_ANCHOR else 1
    if CP_SIZE != 1 or num_query_per_req - skipped != num_speculative_steps:
        return DECLINED
    requests = grid[0]
    slots = flat(idx_mapping_ptr)[:requests]
    bounds = flat(target_query_start_loc_ptr)[: requests + 1]
    first, last = int(bounds[0]), int(bounds[requests])
    context_lengths = gaps(bounds)
    valid = context_lengths - flat(num_rejected_ptr)[:requests]
    target_positions = flat(target_positions_ptr)
    following = target_positions[bounds[:requests] + valid - 1] + 1

    # Context and queries are one array, since the slots of both are looked up in the same table.
    queries = requests * num_query_per_req
    request_of, offset = _grid(requests, num_query_per_req)
    owner, place = segments(context_lengths)
    rejected = place >= valid[owner]
    context = target_positions[first:last].copy()
    context[rejected] = 0
    query = following[request_of] + offset
    positions = np.concatenate((context, query))
    row = np.concatenate((owner, request_of))
    column = np.minimum(positions // block_size, block_table_stride - 1)
    block = block_table_ptr.numpy()[row, column].astype(np.int64)
    slot = block * block_size + positions % block_size
    slot[block == 0] = PAD_SLOT_ID
    context_slots, query_slots = slot[: last - first], slot[last - first :]
    context_slots[rejected] = PAD_SLOT_ID

    flat(out_context_positions_ptr)[first:last] = context
    flat(out_context_slot_mapping_ptr)[first:last] = context_slots
    sampled = flat(num_sampled_ptr)[:requests] > 0
    ids = flat(out_input_ids_ptr)
    ids[:queries] = parallel_drafting_token_id
    ids[:queries:num_query_per_req] = np.where(
        sampled, flat(last_sampled_ptr)[slots], flat(next_prefill_tokens_ptr)[slots]
    )
    np.minimum(query, max_model_len - 1, out=flat(out_query_positions_ptr)[:queries])
    mapping = flat(out_query_slot_mapping_ptr)
    mapping[:queries] = query_slots
    mapping[queries:max_num_tokens] = PAD_SLOT_ID

    starts, lengths = flat(out_query_start_loc_ptr), flat(out_seq_lens_ptr)
    starts[:requests] = np.arange(0, queries, num_query_per_req)
    starts[requests : max_num_reqs + 1] = queries
    lengths[:requests] = np.minimum(following + num_query_per_req, max_model_len)
    lengths[requests:max_num_reqs] = 0

    samples, room = requests * num_speculative_steps, max_num_reqs * num_speculative_steps
    chosen = np.arange(queries)
    if skipped:
        chosen = chosen[offset > 0]
    for out, value, padding in (
        (out_sample_indices_ptr, chosen, 0),
        (out_sample_pos_ptr, query[chosen] + (1 - skipped), 0),
        (out_sample_idx_mapping_ptr, slots[request_of[chosen]], -1),
    ):
        cells = flat(out)
        cells[:samples] = value
        cells[samples:room] = padding

    flat(out_temperature_ptr)[slots] = flat(temperature_ptr)[slots]
    flat(out_seeds_ptr)[slots] = flat(seeds_ptr)[slots]
    return None


@functools.lru_cache(maxsize=64)
def _grid(requests: int, width: int) -> tuple[Array, Array]:
    """Row and column of each cell of a grid, row by row; callers only read them."""
    cell = np.arange(requests * width)
    return cell // width, cell % width
