"""The twins around the KV cache's blocks equal vLLM's kernels, byte for byte."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import SEEDS, TWINS, Batch, bytes_of, compare, few, fewer, kernel

from dspark_deploy.plugin.cpu_engine.twins import blocks, install
from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED


@fewer
@given(SEEDS, st.integers(1, 3), st.integers(1, 4))
def test_blocks_are_cleared_in_every_segment(seed, segments, blocks):
    batch = Batch(seed, 2, 0)
    strides = batch.rng.integers(40, 60, segments)
    pages = [int(batch.rng.integers(1, stride + 1)) for stride in strides]
    tables = [batch.garbage(6, int(stride)) for stride in strides]
    ids = torch.from_numpy(batch.rng.permutation(6)[:blocks])
    results = []
    for launch in (
        kernel("zero_kv_blocks"),
        lambda grid, **given: install.function(TWINS["zero_kv_blocks"])(grid, **given),
    ):
        copies = [table.clone() for table in tables]
        grid = (blocks, segments, 3)  # of 16 words each, so a page of more than 48 keeps its end
        arguments = {
            "seg_addrs_ptr": torch.tensor([copy.data_ptr() for copy in copies], dtype=torch.uint64),
            "seg_block_strides_ptr": torch.from_numpy(strides),
            "seg_page_sizes_ptr": torch.tensor(pages),
            "block_ids_ptr": ids,
            "BLOCK_SIZE": 16,
        }
        launch[grid](**arguments) if hasattr(launch, "arg_names") else launch(grid, **arguments)
        results.append(copies)
    for before, expected, actual in zip(tables, *results, strict=True):
        assert np.array_equal(bytes_of(expected), bytes_of(actual)), f"{before}\n{expected}\n{actual}"
        assert not torch.equal(before, expected)


@few
@given(SEEDS, st.integers(1, 9), st.integers(0, 30), st.integers(0, 2))
def test_each_token_gets_its_request(seed, requests, padding, unmapped):
    batch = Batch(seed, requests, 5)
    tokens = batch.tokens + padding
    mapped = max(0, batch.tokens - unmapped)
    found = compare(
        "token_request_mapping",
        ((tokens + 255) // 256,),
        {
            "query_start_loc": torch.from_numpy(batch.query_start),
            "output": batch.garbage(tokens + 3),
            "num_reqs": requests,
            "num_mapped": mapped,
            "num_tokens": tokens,
        },
    )
    assert not found["output"][mapped:tokens].any()


@few
@given(SEEDS, st.integers(1, 6), st.sampled_from([1, 4, 16]), st.sampled_from([4, 128]), st.booleans())
def test_compressed_entries_are_kept_at_their_slots(seed, requests, block_size, ratio, shared_out):
    batch = Batch(seed, requests, 5)
    wide = int(batch.computed.max() + batch.queries.max()) // (ratio * block_size) + 1
    computed = torch.from_numpy(batch.computed[np.maximum(batch.slots, 0)])
    slots = batch.integers(0, 999, batch.tokens, dtype=torch.int64)
    slots[torch.from_numpy(batch.rng.random(batch.tokens) < 0.2)] = -1
    found = compare(
        "compressed_slot_mapping",
        (requests,),
        {
            "compressed_slot_mapping_ptr": batch.garbage(batch.tokens + 2, dtype=torch.int64),
            "slot_mapping_ptr": slots,
            "query_start_loc_ptr": torch.from_numpy(batch.query_start),
            "seq_lens_ptr": computed + torch.from_numpy(batch.queries),
            "block_table_ptr": batch.integers(1, 99, requests, wide),
            "block_table_stride": wide,
            "block_size": block_size,
            "dcp_world_size": 2 if shared_out else 1,
            "cp_interleave": ratio if shared_out else 1,
            "COMPRESS_RATIO": ratio,
            "PAD_ID": -1,
            "TRITON_BLOCK_SIZE": 16,
        },
    )
    written = found["compressed_slot_mapping_ptr"][: batch.tokens]
    assert (written[slots == -1] == -1).all()


@few
@given(SEEDS, st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_uniform_decodes_become_requests_of_one_token(seed, requests, tokens, spare_columns):
    batch = Batch(seed, requests, 5)
    lengths = batch.integers(0, 40, requests)
    found = compare(
        "prepare_uniform_decode",
        (requests * tokens,),
        {
            "seq_lens_ptr": lengths,
            "decode_seq_lens_ptr": batch.garbage(requests * tokens + 2),
            "block_table_ptr": batch.integers(1, 99, requests, 5 + spare_columns),
            "block_table_stride": 5 + spare_columns,
            "expanded_block_table_ptr": batch.garbage(requests * tokens + 1, 5),
            "expanded_bt_stride": 5,
            "decode_lens_ptr": batch.garbage(requests * tokens + 2),
            "max_decode_len": tokens,
            "BLOCK_SIZE": 2,
        },
    )
    last = found["decode_seq_lens_ptr"][tokens - 1 : requests * tokens : tokens]
    assert torch.equal(last, lengths)


def test_a_table_narrower_than_the_kernel_reads_is_declined():
    narrow = torch.zeros(1, 1, dtype=torch.int32)
    one, two = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)
    entries, slots = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    assert (
        blocks.compressed_slot_mapping(
            (1,),
            entries,
            slots,
            two,
            8 * one,
            narrow,
            1,
            1,
            1,
            1,
            COMPRESS_RATIO=4,
            PAD_ID=-1,
            TRITON_BLOCK_SIZE=8,
        )
        is DECLINED
    )
    assert (
        blocks.prepare_uniform_decode((1,), one, one, narrow, 1, narrow, 2, one, 1, BLOCK_SIZE=8) is DECLINED
    )
    assert not entries.any() and not narrow.any()
