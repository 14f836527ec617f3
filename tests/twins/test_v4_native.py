"""DeepSeek-V4's kernels in torch against vLLM's own in C++, on a CPU that has those (AVX-512); else skipped.

What the caches hold is the same to the byte, and what is computed the same to one step of bfloat16: of the
value itself, or of the largest one where a kernel sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dspark_deploy.plugin.cpu_engine.deepseek_v4 import cache, kernels
from tests.twins.test_v4_kernels import BLOCKS, INDEX, MAIN, SIZE, STATE_SIZE, cos_sin, normal

BF16 = torch.bfloat16
STEP = 2.0**-7  # of bfloat16, relative
POSITIONS, SLOTS = torch.tensor([3, 4, 5, 9, 10]), torch.tensor([3, 4, 5, -1, 6])
SEEDS = pytest.mark.parametrize("seed", range(5))


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if kernels.missing():
        pytest.skip("vLLM has no C++ kernels of DeepSeek-V4 for this CPU")


def both(name: str, call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What `call` makes of vLLM's kernel, and of ours."""
    return call(getattr(torch.ops._C, name)), call(getattr(kernels, name))


def near_the_largest(native: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether sums in another order are apart by a step of the largest value at most."""
    return bool((native.float() - ours.float()).abs().max() <= STEP * ours.float().abs().max())


def near(native: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether two results in bfloat16 are a step apart at most; near zero, of a value of 1/16."""
    return bool(((native.float() - ours.float()).abs() <= STEP * ours.float().abs().clamp(min=1 / 16)).all())


def entries(count: int, seed: int) -> torch.Tensor:
    """A cache of fp8 entries."""
    stored = torch.zeros(BLOCKS, SIZE * 584, dtype=torch.uint8)
    cache.write_rows(stored, torch.arange(count), normal(count, 512, seed=seed), SIZE)
    return stored


@SEEDS
def test_queries_and_stored_keys(seed: int) -> None:
    q, kv = normal(5, 2, 512, seed=seed).to(BF16), normal(5, 512, seed=seed + 1).to(BF16)

    def call(kernel: Any) -> tuple[torch.Tensor, torch.Tensor]:
        stored = torch.zeros(BLOCKS, SIZE * 584, dtype=torch.uint8)
        return kernel(q, kv, POSITIONS, stored, SLOTS, cos_sin(16), 4, 1e-6, SIZE), stored

    (native, native_cache), (ours, our_cache) = both("fused_qnorm_rope_kv_insert_cpu", call)
    assert near(native, ours) and ours.any()
    assert torch.equal(native_cache, our_cache) and our_cache.any()


@SEEDS
def test_attention(seed: int) -> None:
    window = torch.tensor([[1, 2, -1, -1], [2, 3, 5, -1], [-1, -1, -1, -1]])
    compressed = torch.tensor([[0, -1], [7, 3], [-1, -1]])
    q, sink = normal(3, 2, 512, seed=seed).to(BF16), torch.tensor([0.3, -1.0])
    stored, made = entries(12, seed), entries(8, seed + 1)

    def call(kernel: Any) -> torch.Tensor:
        out = torch.full((3, 2, 512), 9.0, dtype=BF16)
        kernel(out, q, stored, window, SIZE, made, compressed, SIZE, sink, 0.05)
        return out

    native, ours = both("flash_mla_with_kvcache_cpu", call)
    assert near_the_largest(native, ours) and ours[:2].any() and not native[2].any()


@SEEDS
def test_rotation_of_the_output(seed: int) -> None:
    outputs = normal(5, 2, 512, seed=seed).to(BF16)
    call = lambda kernel: kernel(outputs, POSITIONS, cos_sin(16), 64)  # noqa: E731
    native, ours = both("inverse_gptj_rope_o_proj_cpu", call)
    assert near(native, ours) and not torch.equal(ours, outputs)


@SEEDS
def test_partial_states(seed: int) -> None:
    kv, score, bias = (normal(*shape, seed=seed + i) for i, shape in enumerate([(3, 32), (3, 32), (2, 32)]))

    def call(kernel: Any) -> torch.Tensor:
        states = torch.zeros(2, 4, 64)
        kernel(kv, score, bias, torch.tensor([0, 1, 2]), states, torch.tensor([5, -1, 2]))
        return states

    native, ours = both("save_partial_states_cpu", call)
    assert torch.equal(native, ours) and ours.any()


@SEEDS
@pytest.mark.parametrize("layout", [MAIN, INDEX], ids=["main", "indexer"])
@pytest.mark.parametrize("overlap", [1, 0], ids=["overlapping", "apart"])
def test_compressed_entries(layout: tuple[int, int, int, int], overlap: int, seed: int) -> None:
    (entry, _, row, scale), ratio, tokens = layout, 4, 11
    width = (1 + overlap) * entry
    states = normal(2, STATE_SIZE, 2 * width, seed=seed) * torch.tensor([1.0, 3.0]).repeat_interleave(width)
    positions = torch.arange(tokens)
    reach = (1 + overlap) * ratio
    local = positions[:, None] - reach + 1 + torch.arange(reach)
    block_table = torch.tensor([1, 0])
    gathered = block_table[local.clamp(min=0) // STATE_SIZE] * STATE_SIZE + local % STATE_SIZE
    gathered = gathered.masked_fill(local < 0, -1)
    slots = torch.where((positions + 1) % ratio == 0, 2 * SIZE - 1 + positions // ratio, -1)
    weight = 1 + 0.2 * normal(entry, seed=seed + 1)

    def call(kernel: Any) -> torch.Tensor:
        stored = torch.zeros(BLOCKS, SIZE * (row + scale), dtype=torch.uint8)
        kernel(states, gathered, positions, slots, weight, 1e-6, cos_sin(tokens), stored, SIZE, ratio)
        return stored

    name = "compress_norm_rope_store_cpu" if layout is MAIN else "compress_norm_rope_store_indexer_cpu"
    native, ours = both(name, call)
    assert torch.equal(native, ours) and ours.any()


@SEEDS
def test_products(seed: int) -> None:
    left, right = normal(2, 32, 64, seed=seed).to(BF16), normal(2, 64, 64, seed=seed + 1).to(BF16)
    results = []
    for kernels_of in (torch.ops._C, kernels):
        out = torch.empty(2, 32, 64, dtype=BF16)
        kernels_of.bmm_cpu(out, left, kernels_of.convert_weight_packed(right), True, None)
        results.append(out)
    assert near_the_largest(*results) and results[1].any()


@SEEDS
def test_routing(seed: int) -> None:
    logits, bias = normal(7, 64, seed=seed), normal(64, seed=seed + 1)
    arguments = (logits.to(BF16), bias, 6, True, "sqrtsoftplus", 0, 1.5, True)
    native, ours = both("biased_topk_cpu", lambda kernel: kernel(normal(7, 128).to(BF16), *arguments))
    dense = [
        torch.zeros(7, 64).scatter(1, chosen.long(), weights.float()) for weights, chosen in (native, ours)
    ]
    assert torch.allclose(*dense, atol=1e-6) and (dense[1] > 0).sum() == 7 * 6
