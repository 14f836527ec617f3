"""The twins that keep block tables equal vLLM's kernels, byte for byte, through raw addresses too."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import SEEDS, TWINS, Batch, bytes_of, compare, few, kernel, tensor

from dspark_deploy.plugin.cpu_engine.twins import install

GROUPS = st.integers(1, 3)


def addresses(tables):
    return torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)


def both(name, grid, arguments, tables):
    """`compare` for kernels that write through addresses: `tables` are the tensors behind them."""
    results = []
    for launch in (kernel(name)[grid], lambda **kwargs: install.function(TWINS[name])(grid, **kwargs)):
        copies = [table.clone() for table in tables]
        launch(**arguments(copies))
        results.append(copies)
    for expected, actual in zip(*results, strict=True):
        assert np.array_equal(bytes_of(expected), bytes_of(actual)), f"{expected}\n{actual}"


@few
@given(SEEDS, st.integers(1, 6), st.sampled_from([torch.int32, torch.int64, torch.float32]), st.booleans())
def test_staged_writes_land(seed, runs, dtype, one_dimensional):
    batch = Batch(seed, 4, 0)
    lengths = batch.rng.integers(1, 2 if one_dimensional else 7, runs)
    output = batch.garbage(*((9,) if one_dimensional else (5, 12)), dtype=dtype)
    compare(
        "apply_write",
        (runs,),
        {
            "output_ptr": output,
            "output_stride": output.stride(0),
            "write_indices_ptr": batch.integers(0, 5, runs),
            "write_starts_ptr": batch.integers(0, 1 if one_dimensional else 6, runs),
            "write_contents_ptr": batch.integers(0, 999, int(lengths.sum()), dtype=dtype),
            "write_cu_lens_ptr": tensor(np.cumsum(lengths).astype(np.int32)),
            "write_group_ids_ptr": None,
            "BLOCK_SIZE": 4,
            "MULTI_GROUP": False,
        },
    )


@few
@given(SEEDS, st.integers(1, 6), GROUPS)
def test_staged_writes_land_in_their_group(seed, runs, groups):
    batch = Batch(seed, 4, 0)
    tables = [batch.garbage(5, int(batch.rng.integers(12, 16))) for _ in range(groups)]
    lengths = batch.rng.integers(1, 6, runs)
    which, rows = batch.integers(0, groups, runs), batch.integers(0, 5, runs)
    starts, contents = batch.integers(0, 6, runs), batch.integers(0, 999, int(lengths.sum()))

    def arguments(copies):
        return {
            "output_ptr": addresses(copies),
            "output_stride": torch.tensor([table.stride(0) for table in copies]),
            "write_indices_ptr": rows,
            "write_starts_ptr": starts,
            "write_contents_ptr": contents,
            "write_cu_lens_ptr": tensor(np.cumsum(lengths).astype(np.int32)),
            "write_group_ids_ptr": which,
            "BLOCK_SIZE": 4,
            "MULTI_GROUP": True,
        }

    both("apply_write", (runs,), arguments, tables)


@few
@given(SEEDS, st.integers(0, 9), st.integers(0, 3), GROUPS)
def test_block_tables_are_gathered(seed, requests, padding, groups):
    batch = Batch(seed, max(requests, 1), 0)
    slots = tensor(batch.slots[:requests])
    widths = batch.rng.integers(1, 20, groups)
    sources = [batch.integers(0, 999, batch.slot_count, int(width)) for width in widths]
    targets = [batch.garbage(requests + padding + 1, int(width)) for width in widths]
    used = np.stack([batch.rng.integers(0, width + 1, batch.slot_count) for width in widths]).astype(np.int32)

    def arguments(copies):
        return {
            "batch_idx_to_req_idx": slots,
            "src_block_table_ptrs": addresses(sources),
            "dst_block_table_ptrs": addresses(copies),
            "block_table_strides": torch.from_numpy(widths),
            "num_blocks_ptr": torch.from_numpy(used),
            "num_blocks_stride": batch.slot_count,
            "num_reqs": requests,
            "BLOCK_SIZE": 4,
        }

    if requests + padding:
        both("gather_block_tables", (groups, requests + padding), arguments, targets)


@few
@given(SEEDS, st.integers(1, 9), st.integers(0, 5), GROUPS, st.booleans(), st.booleans())
def test_slots_are_mapped(seed, requests, k, groups, dummies, huge):
    batch = Batch(seed, requests, k, dummies=dummies)
    tables = [batch.integers(0, 2**28 if huge else 99, batch.slot_count, 70) for _ in range(groups)]
    out = batch.garbage(groups, batch.tokens + 9, dtype=torch.int64)
    compare(
        "compute_slot_mappings",
        (groups, requests + 1),
        {
            "max_num_tokens": batch.tokens + 6,
            "idx_mapping": tensor(batch.slots),
            "query_start_loc": tensor(batch.query_start),
            "pos": batch.integers(0, 70, batch.tokens, dtype=torch.int64),
            "block_table_ptrs": addresses(tables),
            "block_table_strides": torch.full((groups,), 70, dtype=torch.int64),
            "block_sizes": tensor(batch.rng.choice([1, 4, 16, 32], groups).astype(np.int32)),
            "slot_mapping_enabled": tensor(batch.rng.random(groups) < 0.8),
            "dcp_sharded": torch.ones(groups, dtype=torch.bool),
            "slot_mappings_ptr": out,
            "slot_mappings_stride": out.stride(0),
            "cp_rank": 0,
            "CP_SIZE": 1,
            "CP_INTERLEAVE": 1,
            "PAD_ID": -1,
            "TRITON_BLOCK_SIZE": 8,
        },
    )
