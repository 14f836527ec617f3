"""Twins of the kernels around the KV cache's blocks: clearing, each token's request, compressed entries.

Contracts are those of `vllm.v1.worker.utils`, `vllm.v1.attention.ops.metadata` and, for DeepSeek-V4, of
`vllm.v1.attention.backends.mla.compressor_utils` and `indexer`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED


def zero_kv_blocks(
    grid: tuple[int, ...],
    seg_addrs_ptr: torch.Tensor,
    seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor,
    block_ids_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    **_options: Any,
) -> None:
    """Clear grid[0] blocks in each of grid[1] segments, as far as grid[2] chunks of BLOCK_SIZE words reach.

    Reads per segment an address, the words of 4 bytes from block to block, and the words to clear.
    """
    blocks, segments, chunks = grid
    ids = block_ids_ptr.tolist()[:blocks]
    layout = zip(
        seg_addrs_ptr.tolist(), seg_block_strides_ptr.tolist(), seg_page_sizes_ptr.tolist(), strict=True
    )
    for address, stride, size in list(layout)[:segments]:
        for block in ids:
            ctypes.memset(address + 4 * block * stride, 0, 4 * min(size, chunks * BLOCK_SIZE))


def token_request_mapping(
    grid: tuple[int, ...],
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    **_options: Any,
) -> None:
    """Write each token's request, and 0 from token `num_mapped` on, as far as the grid reaches.

    Reads int32 query_start_loc [num_reqs + 1], of which the first is not read.
    """
    tokens = torch.arange(min(num_tokens, 256 * grid[0]))
    ends = query_start_loc[1 : num_reqs + 1].contiguous()
    requests = torch.searchsorted(ends, tokens.to(ends.dtype), right=True).clamp(max=num_reqs - 1)
    output[: len(tokens)] = requests.masked_fill(tokens >= num_mapped, 0).to(output.dtype)


def compressed_slot_mapping(
    grid: tuple[int, ...],
    compressed_slot_mapping_ptr: torch.Tensor,
    slot_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    dcp_world_size: int,
    cp_interleave: int,
    COMPRESS_RATIO: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
    **_options: Any,
) -> Any:
    """Write where the entry that ends at each token of grid[0] requests is kept; PAD_ID where none ends.

    Reads int64 slot_mapping [tokens], int32 query_start_loc [requests + 1], seq_lens [requests] and
    block_table [requests, blocks]. Declines a table that is too narrow, which the kernel would read past.
    """
    requests = grid[0]
    starts = query_start_loc_ptr[: requests + 1].long()
    lengths = starts.diff()
    if block_table_ptr.stride() != (block_table_stride, 1) or bool((lengths < 0).any()):
        return DECLINED
    request = torch.arange(requests).repeat_interleave(lengths)
    tokens = torch.arange(int(starts[0]), int(starts[-1]))
    position = (seq_lens_ptr[:requests].long() - starts[1:])[request] + tokens
    ends = (position + 1) % COMPRESS_RATIO == 0
    ends &= slot_mapping_ptr[tokens] != PAD_ID
    chosen = position[ends]
    local = chosen // (cp_interleave * dcp_world_size) * cp_interleave + chosen % cp_interleave
    entry = local // COMPRESS_RATIO
    block = entry // block_size
    if len(chosen) and not 0 <= int(block.min()) <= int(block.max()) < block_table_ptr.shape[1]:
        return DECLINED
    slots = torch.full_like(tokens, PAD_ID)
    slots[ends] = block_table_ptr[request[ends], block].long() * block_size + entry % block_size
    compressed_slot_mapping_ptr[tokens] = slots
    return None


def prepare_uniform_decode(
    grid: tuple[int, ...],
    seq_lens_ptr: torch.Tensor,
    decode_seq_lens_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    expanded_block_table_ptr: torch.Tensor,
    expanded_bt_stride: int,
    decode_lens_ptr: torch.Tensor,
    max_decode_len: int,
    BLOCK_SIZE: int,
    **_options: Any,
) -> Any:
    """Make a request of one token out of each of grid[0] tokens, `max_decode_len` of them to a request.

    Reads int32 seq_lens [requests] and block_table [requests, blocks]; writes decode_seq_lens [tokens],
    decode_lens [tokens] and the expanded table [tokens, expanded_bt_stride]. Declines a narrower table.
    """
    tokens = grid[0]
    request = torch.arange(tokens) // max_decode_len
    wide = expanded_bt_stride
    if (
        block_table_ptr.stride() != (block_table_stride, 1)
        or block_table_ptr.shape[1] < wide
        or expanded_block_table_ptr.stride() != (wide, 1)
        or expanded_block_table_ptr.shape[1] != wide
    ):
        return DECLINED
    ahead = torch.arange(tokens) % max_decode_len + (1 - max_decode_len)
    decode_seq_lens_ptr[:tokens] = (seq_lens_ptr[request] + ahead).clamp(min=0).to(decode_seq_lens_ptr.dtype)
    expanded_block_table_ptr[:tokens] = block_table_ptr[request, :wide]
    decode_lens_ptr[:tokens] = 1
    return None
