"""Twins of the kernels around the KV cache's blocks: clearing new blocks, and each token's request.

Contracts are those of `vllm.v1.worker.utils` and `vllm.v1.attention.ops.metadata`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


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
