"""Triton kernels that only show what Triton's and vLLM's random functions return."""

from __future__ import annotations

from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import (
    _log1p_neg_stable,
    murmur3_hash32,
    murmur3_uniform32,
    murmur3_uniform64,
    tl_rand32,
)


@triton.jit
def philox(seeds, offsets, integers, uniforms):
    row = tl.program_id(0)
    seed, offset = tl.load(seeds + row), tl.load(offsets + row)
    tl.store(integers + row, tl.randint(seed, offset).to(tl.int32, bitcast=True))
    tl.store(uniforms + row, tl_rand32(seed, offset, includes_zero=False))


@triton.jit
def noise(seeds, positions, keys, hashed, single, double, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    key = tl.load(keys + lane)
    seed, position = tl.load(seeds), tl.load(positions)
    tl.store(hashed + lane, murmur3_hash32(seed, position, key).to(tl.int32, bitcast=True))
    small = murmur3_uniform32(seed, position, key)
    tl.store(single + lane, -tl.log(-_log1p_neg_stable(small)))
    large = murmur3_uniform64(seed, position, key)
    tl.store(double + lane, -tl.log(-tl.log(large)))
