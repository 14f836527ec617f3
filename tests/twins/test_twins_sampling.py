"""The twins that pick tokens equal vLLM's kernels: random bits, noise, tokens and caches, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import SEEDS, TWINS, Batch, compare, few, fewer

from dspark_deploy.plugin.cpu_engine.twins import install, philox

LONGS = st.integers(-(2**63), 2**63 - 1)


@few
@given(st.lists(st.tuples(LONGS, LONGS), min_size=1, max_size=9))
def test_philox_is_tritons(pairs_of_longs):
    import kernels_of_randomness as kernels

    seeds = torch.tensor([seed for seed, _ in pairs_of_longs])
    offsets = torch.tensor([offset for _, offset in pairs_of_longs])
    integers = torch.zeros(len(seeds), dtype=torch.int32)
    uniforms = torch.zeros(len(seeds), dtype=torch.float32)
    kernels.philox[(len(seeds),)](seeds, offsets, integers, uniforms)
    assert np.array_equal(philox.randint(seeds.numpy(), offsets.numpy()).view(np.int32), integers.numpy())
    assert np.array_equal(philox.uniform(seeds.numpy(), offsets.numpy()), uniforms.numpy())


@few
@given(LONGS, LONGS, st.integers(0, 2**20))
def test_gumbel_noise_is_vllms(seed, position, first_key):
    import kernels_of_randomness as kernels

    keys = torch.arange(first_key, first_key + 64, dtype=torch.int32)
    hashed = torch.zeros(64, dtype=torch.int32)
    single, double = torch.zeros(64), torch.zeros(64, dtype=torch.float64)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    kernels.noise[(1,)](seeds, positions, keys, hashed, single, double, SIZE=64)
    ours = (seeds.numpy(), positions.numpy(), keys.numpy().astype(np.uint32))
    assert np.array_equal(philox.murmur3(*ours)[0].view(np.int32), hashed.numpy())
    assert np.array_equal(philox.gumbel32(*ours)[0], single.numpy())
    assert np.array_equal(philox.gumbel64(*ours)[0], double.numpy())


def test_the_smallest_draw_is_positive():
    draws = philox.uniform(np.arange(4096), np.arange(4096))
    assert 0 < draws.min() < 1e-2
    assert 0.99 < draws.max() < 1


def gumbel_arguments(batch, rows, vocab, block, *, halves, drafting, scaled, double, cached):
    dtype = torch.bfloat16 if halves else torch.float32
    rng = batch.rng
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32)).to(dtype)
    logits[torch.from_numpy(rng.random(logits.shape) < 0.1)] = -np.inf
    logits[torch.from_numpy(rng.random(logits.shape) < 0.02)] = np.nan
    logits[:, ::block] = 1.0
    slots = torch.from_numpy(rng.permutation(batch.slot_count)[:rows].astype(np.int64))
    slots[torch.from_numpy(rng.random(rows) < 0.15)] = -1
    blocks = -(-vocab // block)
    best = batch.garbage(rows, blocks + 1, dtype=torch.int64)
    value = batch.garbage(rows, blocks + 1, dtype=torch.float64 if double else torch.float32)
    cache = batch.garbage(batch.slot_count, 4, vocab + 3).to(dtype)
    source = batch.garbage(rows, vocab).to(dtype)
    return {
        "local_argmax_ptr": best[:, :blocks].clone(),
        "local_argmax_stride": blocks,
        "local_max_ptr": value[:, :blocks].clone(),
        "local_max_stride": blocks,
        "logits_cache_ptr": None if cached is None else cache,
        "logits_cache_stride_0": cache.stride(0),
        "logits_cache_stride_1": cache.stride(1),
        "logits_cache_col_ptr": None
        if cached is None
        else batch.integers(0, 4, rows)
        if cached == "column by row"
        else torch.tensor(2, dtype=torch.int32),
        "logits_cache_source_ptr": None if cached is None else source,
        "logits_cache_source_stride": source.stride(0),
        "logits_ptr": logits,
        "logits_stride": logits.stride(0),
        "expanded_idx_mapping_ptr": slots,
        "seeds_ptr": batch.integers(-(2**63), 2**63 - 1, batch.slot_count, dtype=torch.int64),
        "pos_ptr": batch.integers(0, 2**30, rows, dtype=torch.int64),
        "temp_ptr": torch.from_numpy(rng.choice([0.0, 1.0, 0.6], batch.slot_count).astype(np.float32)),
        "vocab_size": vocab,
        "BLOCK_SIZE": block,
        "IS_DRAFTING": drafting,
        "APPLY_TEMPERATURE": scaled,
        "USE_FP64": double,
        "PER_TOKEN_COL": cached == "column by row",
    }


@few
@given(
    SEEDS, st.integers(1, 9), st.sampled_from([7, 64, 352, 1500]), st.sampled_from([64, 1024]),
    st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([None, "one column", "column by row"]),
)  # fmt: skip
def test_gumbel_sampling(seed, rows, vocab, block, halves, drafting, scaled, double, cached):
    batch = Batch(seed, rows, 0)
    arguments = gumbel_arguments(
        batch,
        rows,
        vocab,
        block,
        halves=halves,
        drafting=drafting,
        scaled=scaled,
        double=double,
        cached=cached,
    )
    compare("gumbel_sample", (rows, -(-vocab // block)), arguments)


def test_a_row_without_a_single_logit_raises_as_the_kernel_does():
    batch = Batch(1, 2, 0)
    arguments = gumbel_arguments(
        batch, 2, 64, 64, halves=False, drafting=False, scaled=False, double=False, cached=None
    )
    arguments["logits_ptr"].fill_(float("nan"))
    with pytest.raises(ValueError, match="All-NaN"):
        install.function(TWINS["gumbel_sample"])((2, 1), **arguments)
    with pytest.raises(Exception, match="All-NaN"):
        install._kernel(TWINS["gumbel_sample"])[(2, 1)](**arguments)


@fewer
@given(SEEDS, st.integers(1, 9), st.sampled_from([5, 352, 9000]))
def test_temperature(seed, rows, vocab):
    batch = Batch(seed, rows, 0)
    logits = torch.from_numpy(batch.rng.normal(0, 3, (rows, vocab + 3)).astype(np.float32))
    compare(
        "temperature",
        (rows, -(-vocab // 8192)),
        {
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "expanded_idx_mapping_ptr": batch.integers(0, batch.slot_count, rows, dtype=torch.int64),
            "temperature_ptr": torch.from_numpy(
                batch.rng.choice([0.0, 1.0, 0.6, 1.3], batch.slot_count).astype(np.float32)
            ),
            "vocab_size": vocab,
            "BLOCK_SIZE": 8192,
        },
    )


@fewer
@given(SEEDS, st.integers(1, 9), st.sampled_from([5, 352, 3000]))
def test_min_p(seed, rows, vocab):
    batch = Batch(seed, rows, 0)
    logits = torch.from_numpy(batch.rng.normal(0, 2, (rows, vocab + 3)).astype(np.float32))
    compare(
        "min_p",
        (rows,),
        {
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "expanded_idx_mapping_ptr": batch.integers(0, batch.slot_count, rows, dtype=torch.int64),
            "min_p_ptr": torch.from_numpy(
                batch.rng.choice([0.0, 0.05, 0.3], batch.slot_count).astype(np.float32)
            ),
            "vocab_size": vocab,
            "BLOCK_SIZE": 1024,
        },
    )
