"""DeepSeek-V4's cache rows: 448 channels in fp8 with a power-of-two scale for each 64, 64 in bfloat16.

A block of S tokens holds S rows of 576 bytes, then S times 8 bytes of scales, seven in use; a scale byte is
the exponent plus 127. Layout and rounding are those of vLLM's kernels in `fused_compress_quant_cache`, which
tests hold this against within a step of fp8: Triton's interpreter rounds otherwise. R rows, B blocks.

The indexer's rows (128 channels in fp8, then a float32 scale) are written as vLLM does; where there are no
more entries than the indexer keeps, nothing reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEAD, ROTATED = 512, 64
PLAIN = HEAD - ROTATED
GROUP = 64  # channels that share a scale
ROW_BYTES = PLAIN + 2 * ROTATED
SCALE_BYTES = 8
INDEX_BYTES, INDEX_SCALE_BYTES = 128, 4
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST = 1e-4
"""The smallest magnitude that a scale is made for."""


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, back: bool = False) -> Tensor:
    """Rotate the last 64 channels of `x` [R, ..., E], fp32, in neighbouring pairs; `back` undoes it.

    `cos_sin` [positions, 64]: 32 cosines, then 32 sines.
    """
    table = cos_sin[positions].float()
    table = table.view(len(table), *(1 for _ in range(x.dim() - 2)), table.shape[-1])
    cos, sin = table.chunk(2, -1)
    sin = -sin if back else sin
    even, odd = x[..., -ROTATED::2], x[..., -ROTATED + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-ROTATED], turned], -1)


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor, rows_per_block: int) -> None:
    """Store `rows` [R, 512], fp32 and rotated, at `slots` [R] of `cache` [B, bytes], but for slots of -1."""
    used = slots >= 0
    slots, rows = slots[used], rows[used]
    plain = rows[:, :PLAIN].to(torch.bfloat16).float().view(-1, PLAIN // GROUP, GROUP)
    exponents = _exponents(plain)
    data = _fp8(plain, exponents).flatten(1)
    rotated = rows[:, PLAIN:].to(torch.bfloat16).contiguous().view(torch.uint8)
    scales = torch.cat([(exponents.squeeze(-1) + 127).clamp(0, 255), torch.zeros(len(rows), 1)], 1)
    blocks, within = slots // rows_per_block, slots % rows_per_block
    parts = _parts(cache, rows_per_block, ROW_BYTES, SCALE_BYTES)
    parts[0][blocks, within] = torch.cat([data, rotated], 1)
    parts[1][blocks, within] = scales.to(torch.uint8)


def read_rows(cache: Tensor, slots: Tensor, rows_per_block: int) -> Tensor:
    """The rows at `slots` [R], none of them -1, of `cache` [B, bytes]: [R, 512], fp32."""
    blocks, within = slots // rows_per_block, slots % rows_per_block
    data, scales = (part[blocks, within] for part in _parts(cache, rows_per_block, ROW_BYTES, SCALE_BYTES))
    factors = torch.exp2(scales[:, : PLAIN // GROUP].float() - 127).unsqueeze(-1)
    plain = data[:, :PLAIN].contiguous().view(FP8).float().view(-1, PLAIN // GROUP, GROUP) * factors
    rotated = data[:, PLAIN:].contiguous().view(torch.bfloat16).float()
    return torch.cat([plain.flatten(1), rotated], 1)


def write_index_rows(cache: Tensor, slots: Tensor, rows: Tensor, rows_per_block: int) -> None:
    """Store the indexer's `rows` [R, 128], fp32 and rotated, at `slots` [R], but for slots of -1."""
    used = slots >= 0
    slots, values = slots[used], rows[used].to(torch.bfloat16).float()
    exponents = _exponents(values)
    blocks, within = slots // rows_per_block, slots % rows_per_block
    parts = _parts(cache, rows_per_block, INDEX_BYTES, INDEX_SCALE_BYTES)
    parts[0][blocks, within] = _fp8(values, exponents)
    parts[1][blocks, within] = torch.exp2(exponents).contiguous().view(torch.uint8)


def _parts(cache: Tensor, rows_per_block: int, row_bytes: int, scale_bytes: int) -> tuple[Tensor, Tensor]:
    """Views of the rows [B, S, bytes] and of their scales."""
    data = rows_per_block * row_bytes
    scales = cache[:, data : data + rows_per_block * scale_bytes]
    return (
        cache[:, :data].unflatten(1, (rows_per_block, row_bytes)),
        scales.unflatten(1, (rows_per_block, scale_bytes)),
    )


def _exponents(values: Tensor) -> Tensor:
    """The scale of each last dimension, as a power of two that brings it within fp8: [..., 1]."""
    largest = values.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return torch.ceil(torch.log2(largest * (1 / FP8_MAX)))


def _fp8(values: Tensor, exponents: Tensor) -> Tensor:
    scaled = (values * torch.exp2(-exponents)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(FP8).view(torch.uint8)
