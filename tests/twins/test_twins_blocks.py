"""The twins around the KV cache's blocks equal vLLM's kernels, byte for byte."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import SEEDS, TWINS, Batch, bytes_of, compare, few, fewer, kernel

from dspark_deploy.plugin.cpu_engine.twins import install


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
