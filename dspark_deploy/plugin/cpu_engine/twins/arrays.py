"""NumPy views of what a kernel is launched with. A CPU tensor and its view share memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def flat(tensor: torch.Tensor) -> Array:
    """A contiguous tensor as a one-dimensional view, which is how a kernel sees its pointer."""
    array = tensor.numpy()
    return array if array.ndim == 1 else array.reshape(-1)


def floats(tensor: torch.Tensor) -> Array:
    """The values as float32: a view where they are that already, otherwise an exact widening copy."""
    if tensor.dtype is torch.float32:
        return tensor.numpy()
    return tensor.float().numpy()


def at_address(address: int, length: int) -> Array:
    """`length` int32 at `address`: a table that a kernel is given as a number, like vLLM's block tables."""
    cells = (ctypes.c_int32 * length).from_address(address)
    return np.frombuffer(memoryview(cells).cast("B"), dtype=np.int32)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, and at least 1."""
    return 1 << (number - 1).bit_length()


def segments(lengths: Array) -> tuple[Array, Array]:
    """The rows of segments laid end to end: which segment each row is in, and its place in the segment."""
    if len(lengths) == 1:  # one request, the case that a step's latency is measured by
        place = np.arange(lengths[0])
        return np.zeros_like(place), place
    owner = np.repeat(np.arange(len(lengths)), lengths)
    first = np.cumsum(lengths) - lengths
    return owner, np.arange(len(owner)) - first[owner]


def gaps(bounds: Array) -> Array:
    """Lengths of the segments between cumulative bounds: `np.diff` without its checks."""
    return bounds[1:] - bounds[:-1]
