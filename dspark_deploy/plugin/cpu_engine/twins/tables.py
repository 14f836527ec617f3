"""Twins of the kernels that keep block tables: staged writes, the batch's table, the slot mapping.

Contracts are those of `vllm.v1.worker.gpu.buffer_utils` and `block_table`. Shapes: R requests in the batch,
G groups of KV cache, N request slots. One-dimensional tensors are contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dspark_deploy.plugin.cpu_engine.twins.arrays import Array, at_address, flat, gaps, segments
from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED


def apply_write(
    grid: tuple[int, ...],
    output_ptr: torch.Tensor,
    output_stride: Any,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
    **_options: Any,
) -> None:
    """Write W = grid[0] runs of values, in their order, each into one row of a table.

    Run w is contents[cu_lens[w-1]:cu_lens[w]] and lands at row indices[w], from column starts[w]. Reads
    int32 indices, starts and cu_lens [W]. Writes those cells of `output` (int32, int64 or float32; one or
    two dimensions) and nothing else. With MULTI_GROUP, `output` holds G addresses of int32 tables,
    `output_stride` their row lengths, and group_ids [W] says which table a run is for.
    """
    runs = grid[0]
    rows, starts = write_indices_ptr.tolist(), write_starts_ptr.tolist()
    ends = write_cu_lens_ptr.tolist()
    contents = flat(write_contents_ptr)
    if MULTI_GROUP:
        assert write_group_ids_ptr is not None
        addresses, strides = output_ptr.tolist(), output_stride.tolist()
        groups = write_group_ids_ptr.tolist()
    else:
        table, stride = flat(output_ptr), output_stride
    begin = 0
    for run in range(runs):
        end = ends[run]
        length = end - begin
        if MULTI_GROUP:
            stride = strides[groups[run]]
            offset = rows[run] * stride + starts[run]
            at_address(addresses[groups[run]] + 4 * offset, length)[:] = contents[begin:end]
        else:
            offset = rows[run] * stride + starts[run]
            table[offset : offset + length] = contents[begin:end]
        begin = end


def gather_block_tables(
    grid: tuple[int, ...],
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
    **_options: Any,
) -> None:
    """Copy the batch's rows of each group's block table, and zero the rows that pad the batch.

    grid is (G, padded R). Reads int64 slots [R], all >= 0, int32 num_blocks [G, N], and per group an
    address of int32 [N, stride]. Writes dst[g][r, :num_blocks[g, slot]] for r < R and the whole of rows
    R..padded; the rest of a live row keeps what it held.
    """
    groups, padded = grid
    slots = flat(batch_idx_to_req_idx)[:num_reqs]
    sources, targets = src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist()
    for group, stride in enumerate(block_table_strides.tolist()[:groups]):
        target = at_address(targets[group], padded * stride).reshape(padded, stride)
        target[num_reqs:] = 0
        if not num_reqs:
            continue
        used = num_blocks_ptr.numpy()[group][slots]
        width = int(used.max())
        slot_count = int(slots.max()) + 1
        source = at_address(sources[group], slot_count * stride).reshape(slot_count, stride)
        live = np.arange(width) < used[:, None]
        np.copyto(target[:num_reqs, :width], source[slots, :width], where=live)


def compute_slot_mappings(
    grid: tuple[int, ...],
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
    **_options: Any,
) -> object:
    """Say for each scheduled token in which slot of each group's KV cache it lives.

    grid is (G, R + 1). Reads int64 idx_mapping [R] (negative: a dummy request), int32 query_start_loc
    [R + 1], non-decreasing, int64 positions, and per group an address of int32 [N, stride], a block size
    and a switch. Writes int64 slot_mappings[g, query_start_loc[0]:max_num_tokens]: the slot, or PAD_ID for
    dummies, for groups without a mapping and for what lies past the last token; what lies before the first
    token is untouched. Declines context parallelism.
    """
    if CP_SIZE != 1:
        return DECLINED
    requests = grid[1] - 1
    bounds = flat(query_start_loc)[: requests + 1]
    first, last = int(bounds[0]), int(bounds[requests])
    owner, _ = segments(gaps(bounds))
    slots = flat(idx_mapping)[:requests]
    dummies = slots < 0
    row = slots[owner]
    positions = flat(pos)[first:last]
    enabled, sizes = slot_mapping_enabled.tolist(), flat(block_sizes)
    addresses = block_table_ptrs.tolist()
    for group, stride in enumerate(block_table_strides.tolist()[: grid[0]]):
        mapping = slot_mappings_ptr[group].numpy()
        mapping[last:max_num_tokens] = PAD_ID
        if not enabled[group] or not len(row):
            mapping[first:last] = PAD_ID
            continue
        cells = row * stride + positions // sizes[group]
        if dummies.any():
            cells[row < 0] = 0
        table = at_address(addresses[group], int(cells.max()) + 1)
        mapping[first:last] = _slots(table[cells], positions, sizes[group])
        if dummies.any():
            mapping[first:last][row < 0] = PAD_ID
    return None


def _slots(blocks: Array, positions: Array, size: np.int32) -> Array:
    """Block numbers are multiplied as int32, as the kernel does, and widened only by the position."""
    return blocks * size + positions % size
