"""The random numbers of vLLM's kernels, bit for bit: Triton's Philox, and vLLM's murmur3 Gumbel noise.

`uniform` is `tl.rand` (Philox 4x32, ten rounds), which decides whether a draft is accepted. `gumbel32` and
`gumbel64` are the noise of `vllm.v1.worker.gpu.sample.gumbel`, which picks tokens. The integers are exact;
so are the floats, since Triton's interpreter computes them with the same NumPy functions.
"""

from __future__ import annotations

import numpy as np

from dspark_deploy.plugin.cpu_engine.twins.arrays import Array

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_RAND_SCALE = np.float32(4.6566127342e-10)

_MURMUR_1, _MURMUR_2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_MURMUR_5, _MURMUR_ADD = np.uint32(5), np.uint32(0xE6546B64)
_FINAL_1, _FINAL_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_HASHED_BYTES = np.uint32(16)
_SECOND_DOMAIN = 0x9E3779B9
_SERIES = [np.float32(1.0 / term) for term in range(8, 0, -1)]


def randint(seeds: Array, offsets: Array) -> Array:
    """`tl.randint` of int64 seeds and offsets [n]: uint32 [n]."""
    seed, offset = seeds.astype(np.uint64), offsets.astype(np.uint64)
    # Rows are the words (0, 2) and (1, 3) of the counter: the two lanes of a round are one operation.
    even = np.zeros((2, len(offset)), dtype=np.uint64)
    odd = np.zeros_like(even)
    even[0], odd[0] = offset & _LOW, offset >> _HALF
    key = np.stack([seed & _LOW, seed >> _HALF])
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even = (product[::-1] >> _HALF) ^ odd ^ key
        odd = product[::-1] & _LOW
        key = (key + _WEYL) & _LOW
    return even[0].astype(np.uint32)


def uniform(seeds: Array, offsets: Array) -> Array:
    """`tl.rand` of int64 seeds and offsets [n], at least its smallest positive value: float32 [n]."""
    bits = randint(seeds, offsets).view(np.int32)
    draws = np.where(bits < 0, ~bits, bits).astype(np.float32) * _RAND_SCALE
    return np.maximum(draws, _RAND_SCALE)


def murmur3(seeds: Array, positions: Array, keys: Array, domain: int = 0) -> Array:
    """murmur3 of int64 seeds and positions [n] with uint32 keys [V]: uint32 [n, V]."""
    state = np.full(len(seeds), domain, dtype=np.uint32)
    for word in (seeds, seeds >> 32, positions):
        state = _mix(state, word.astype(np.uint32))
    hashed = _mix(state[:, None], keys) ^ _HASHED_BYTES
    hashed ^= hashed >> 16
    hashed *= _FINAL_1
    hashed ^= hashed >> 13
    hashed *= _FINAL_2
    hashed ^= hashed >> 16
    return hashed


def _mix(state: Array, word: Array) -> Array:
    word = _rotate(word * _MURMUR_1, 15) * _MURMUR_2
    return _rotate(state ^ word, 13) * _MURMUR_5 + _MURMUR_ADD


def _rotate(word: Array, bits: int) -> Array:
    return (word << bits) | (word >> (32 - bits))


def gumbel32(seeds: Array, positions: Array, keys: Array) -> Array:
    """Gumbel noise as vLLM draws it in single precision: float32 [n, V]."""
    bits = murmur3(seeds, positions, keys)
    draws = (bits >> 16).astype(np.float32) * np.float32(2.0**-16)
    draws += ((bits & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    series = np.full_like(draws, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series *= draws
        series += coefficient
    direct = np.log(np.fmax(np.float32(1.0) - draws, np.float32(2.0**-24)))
    log_complement = np.where(draws < np.float32(0.25), -draws * series, direct)
    return -np.log(-log_complement)


def gumbel64(seeds: Array, positions: Array, keys: Array) -> Array:
    """Gumbel noise as vLLM draws it in double precision: float64 [n, V]."""
    low = murmur3(seeds, positions, keys).astype(np.uint64)
    high = murmur3(seeds, positions, keys, _SECOND_DOMAIN).astype(np.uint64)
    draws = ((((high << _HALF) | low) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(np.where(draws == 1.0, draws - 2.0**-53, draws)))
