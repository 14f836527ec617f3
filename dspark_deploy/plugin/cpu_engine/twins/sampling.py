"""Twins of the kernels that turn logits into tokens: temperature, min-p, Gumbel-max sampling.

Contracts are those of `vllm.v1.worker.gpu.sample.gumbel` and `min_p`. Shapes: L rows of logits, V tokens of
vocabulary, N request slots, B = ceil(V / BLOCK_SIZE) blocks. Logits are float32, bfloat16 or float16 with a
contiguous last dimension; every row is reduced in float32, or in float64 where the kernel is told so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dspark_deploy.plugin.cpu_engine.twins import philox
from dspark_deploy.plugin.cpu_engine.twins.arrays import Array, flat, floats

# vLLM keeps the draft's noise apart from the target's by this offset of the position.
_DRAFT_POSITION_SALT = 1 << 30


def temperature(
    grid: tuple[int, ...],
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    **_options: Any,
) -> None:
    """Divide each row [L, V] by its request's temperature, in place, unless that is 0 or 1.

    Reads int64 slots [L] and float32 temperatures [N]. Columns from `vocab_size` on are untouched.
    """
    scale = flat(temperature_ptr)[flat(expanded_idx_mapping_ptr)[: grid[0]]]
    rows = np.flatnonzero((scale != 0.0) & (scale != 1.0))
    if not len(rows):
        return
    index = torch.from_numpy(rows)
    scaled = floats(logits_ptr[index, :vocab_size]) / scale[rows, None]
    logits_ptr[index, :vocab_size] = torch.from_numpy(scaled).to(logits_ptr.dtype)


def min_p(
    grid: tuple[int, ...],
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    **_options: Any,
) -> None:
    """Set to -inf, in place, what is less likely than min_p times the most likely token of its row.

    Reads float32 logits [L, V], int64 slots [L] and float32 min_p [N]; rows with min_p 0 are untouched.
    """
    share = flat(min_p_ptr)[flat(expanded_idx_mapping_ptr)[: grid[0]]]
    logits = logits_ptr.numpy()[:, :vocab_size]
    for row in np.flatnonzero(share).tolist():
        threshold = np.fmax.reduce(logits[row]) + np.log(share[row])
        logits[row][logits[row] < threshold] = -np.inf


def gumbel_sample(
    grid: tuple[int, ...],
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
    **_options: Any,
) -> None:
    """The best token of each block of the vocabulary, under Gumbel noise unless the temperature is 0.

    grid is (L, B). Reads logits [L, V], int64 slots [L] (negative: a padding row, which is greedy), int64
    positions [L], int64 seeds and float32 temperatures [N]. Writes int64 local_argmax and local_max [L, B],
    the latter float32, or float64 with USE_FP64. Where there is a cache [N, k, >= V], also copies the
    source's rows (same dtype) into cache[slot, column, :V], except those of padding rows.
    """
    rows = grid[0]
    slots = flat(expanded_idx_mapping_ptr)[:rows]
    live = slots >= 0
    scale = np.where(live, flat(temp_ptr)[slots], np.float32(0.0))
    if logits_cache_ptr is not None:
        assert logits_cache_col_ptr is not None
        assert logits_cache_source_ptr is not None
        chosen = np.flatnonzero(live)
        columns = flat(logits_cache_col_ptr)
        columns = columns[chosen] if PER_TOKEN_COL else columns[0]
        _cells(logits_cache_ptr)[slots[chosen], columns, :vocab_size] = _cells(logits_cache_source_ptr)[
            chosen, :vocab_size
        ]
    logits = floats(logits_ptr)[:rows, :vocab_size]
    if scale.any():
        positions = flat(pos_ptr)[:rows] + (_DRAFT_POSITION_SALT if IS_DRAFTING else 0)
        logits = noised(logits, scale, flat(seeds_ptr)[slots], positions, APPLY_TEMPERATURE, USE_FP64)
    best, value = block_argmax(logits, BLOCK_SIZE)
    local_argmax_ptr.numpy()[:rows] = best
    local_max_ptr.numpy()[:rows] = value


def noised(
    logits: Array, scale: Array, seeds: Array, positions: Array, apply_temperature: bool, double: bool
) -> Array:
    """float32 logits [n, V] with Gumbel noise in the rows whose `scale` isn't 0, in float64 if `double`.

    A row's noise depends on its seed and position, and on the token alone, so that a token draws the same
    wherever its row stands.
    """
    kind = np.float64 if double else np.float32
    keys = np.arange(logits.shape[1], dtype=np.uint32)
    gumbel = philox.gumbel64 if double else philox.gumbel32
    if scale.all():
        drawn = logits / scale[:, None] if apply_temperature else logits
        return drawn.astype(kind, copy=False) + gumbel(seeds, positions, keys)
    mixed = logits.astype(kind)
    rows = np.flatnonzero(scale)
    drawn = logits[rows] / scale[rows, None] if apply_temperature else logits[rows]
    mixed[rows] = drawn.astype(kind, copy=False) + gumbel(seeds[rows], positions[rows], keys)
    return mixed


def block_argmax(logits: Array, block_size: int) -> tuple[Array, Array]:
    """Argmax (int64, of the whole row) and maximum by block of [n, V], both [n, B]; NaN counts as missing.

    Raises ValueError for a block of nothing but NaN, as Triton's interpreter does.
    """
    rows, vocab = logits.shape
    if vocab <= block_size:
        place = logits.argmax(axis=1)
        value = logits[np.arange(rows), place]
        if np.isnan(value).any():
            place, value = np.nanargmax(logits, axis=1), np.nanmax(logits, axis=1)
        return place[:, None], value[:, None]
    blocks = -(-vocab // block_size)
    padded = np.full((rows, blocks * block_size), -np.inf, dtype=logits.dtype)
    padded[:, :vocab] = logits
    place, value = block_argmax(padded.reshape(rows * blocks, block_size), block_size)
    starts = np.arange(0, blocks * block_size, block_size)
    return place.reshape(rows, blocks) + starts, value.reshape(rows, blocks)


def _cells(tensor: torch.Tensor) -> Array:
    """A view for copying. NumPy has no bfloat16, whose bits copy as well as int16."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
