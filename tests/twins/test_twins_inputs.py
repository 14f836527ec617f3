"""The twins that lay out a step and book its outcome equal vLLM's kernels, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import SEEDS, Batch, compare, few, tensor

REQUESTS = st.integers(1, 9)
DRAFTS = st.integers(0, 8)


@few
@given(SEEDS, REQUESTS, DRAFTS)
def test_positions_and_lengths(seed, requests, k):
    batch = Batch(seed, requests, k)
    room = requests + 4
    left = compare(
        "prepare_pos_seq_lens",
        (requests + 1,),
        {
            "pos_ptr": batch.garbage(batch.tokens + 5, dtype=torch.int64),
            "seq_lens_ptr": batch.garbage(room + 2),
            "idx_mapping_ptr": tensor(batch.slots),
            "query_start_loc_ptr": tensor(batch.query_start),
            "num_computed_tokens_ptr": tensor(batch.computed),
            "max_num_reqs": room,
            "BLOCK_SIZE": 1024,
        },
    )
    assert left["seq_lens_ptr"][requests:room].eq(0).all()


@few
@given(SEEDS, REQUESTS, st.integers(1, 3))
def test_prefill_tokens(seed, requests, lookahead):
    batch = Batch(seed, requests, 3)
    tokens = batch.integers(3, 300, batch.slot_count, 64)
    ahead = batch.garbage(lookahead, batch.slot_count)
    compare(
        "prepare_prefill_inputs",
        (requests,),
        {
            "input_ids_ptr": batch.garbage(batch.tokens + 5),
            "next_prefill_tokens_ptr": ahead,
            "next_prefill_tokens_stride": ahead.stride(0),
            "num_lookahead": lookahead,
            "idx_mapping_ptr": tensor(batch.slots),
            "query_start_loc_ptr": tensor(batch.query_start),
            "all_token_ids_ptr": tokens,
            "all_token_ids_stride": tokens.stride(0),
            "prefill_lens_ptr": tensor(batch.prefill),
            "num_computed_tokens_ptr": tensor(batch.computed),
            "BLOCK_SIZE": 8,
            "LOOKAHEAD_BLOCK": 4,
        },
    )


@few
@given(SEEDS, REQUESTS, DRAFTS, st.sampled_from([0, 1]))
def test_sampled_and_draft_tokens_are_combined(seed, requests, k, fresh):
    batch = Batch(seed, requests, max(k, 1 - fresh))
    if not fresh:  # no bonus row: all rows of logits are drafts
        batch.cu_logits = batch._cumulative(batch.rows - 1)
        batch.logits = int(batch.cu_logits[-1])
    seq_lens = batch.computed[batch.slots] + batch.queries
    drafts = batch.integers(3, 300, batch.slot_count, batch.k, dtype=torch.int64)
    compare(
        "combine_sampled_and_draft_tokens",
        (requests,),
        {
            "input_ids_ptr": batch.garbage(batch.tokens + 5),
            "idx_mapping_ptr": tensor(batch.slots),
            "last_sampled_tokens_ptr": batch.integers(3, 300, batch.slot_count, 1, dtype=torch.int64),
            "query_start_loc_ptr": tensor(batch.query_start),
            "seq_lens_ptr": tensor(seq_lens),
            "prefill_len_ptr": tensor(batch.prefill),
            "draft_tokens_ptr": drafts,
            "draft_tokens_stride": drafts.stride(0),
            "cu_num_logits_ptr": tensor(batch.cu_logits),
            "logits_indices_ptr": batch.garbage(batch.logits + 3, dtype=torch.int64),
            "BLOCK_SIZE": 16,
            "NUM_NEW_SAMPLED_TOKENS": fresh,
        },
    )


@few
@given(SEEDS, REQUESTS, DRAFTS)
def test_slots_are_spread_over_rows(seed, requests, k):
    batch = Batch(seed, requests, k)
    compare(
        "expand_idx_mapping",
        (requests,),
        {
            "idx_mapping_ptr": tensor(batch.slots),
            "expanded_idx_mapping_ptr": batch.garbage(batch.logits + 3, dtype=torch.int64),
            "expanded_local_pos_ptr": batch.garbage(batch.logits + 3),
            "cu_num_logits_ptr": tensor(batch.cu_logits),
            "BLOCK_SIZE": 16,
        },
    )


@few
@given(SEEDS, REQUESTS, DRAFTS)
def test_rejected_drafts_are_counted(seed, requests, k):
    batch = Batch(seed, requests, k)
    sampled = torch.from_numpy(batch.rng.integers(1, batch.rows + 1).astype("int32"))
    compare(
        "get_num_sampled_and_rejected",
        (requests,),
        {
            "num_sampled_ptr": torch.cat([sampled, batch.garbage(2)]),
            "num_rejected_ptr": batch.garbage(requests + 2),
            "seq_lens_ptr": tensor(batch.computed[batch.slots] + batch.queries),
            "cu_num_logits_ptr": tensor(batch.cu_logits),
            "idx_mapping_ptr": tensor(batch.slots),
            "prefill_len_ptr": tensor(batch.prefill),
        },
    )


@few
@given(SEEDS, REQUESTS, DRAFTS, st.booleans(), st.booleans(), st.booleans())
def test_states_are_updated(seed, requests, k, counted, dummies, has_queries):
    batch = Batch(seed, requests, k, dummies=dummies)
    sampled = batch.integers(0, 20, requests, k + 1, dtype=torch.int64)
    counts = batch.integers(0, k + 2, requests)
    tokens = batch.integers(3, 300, batch.slot_count, 80)
    bins = batch.integers(0, 5, batch.slot_count, 20)
    compare(
        "post_update",
        (requests,),
        {
            "idx_mapping_ptr": tensor(batch.slots),
            "num_computed_tokens_ptr": tensor(batch.computed),
            "last_sampled_tokens_ptr": batch.garbage(batch.slot_count, 1, dtype=torch.int64),
            "output_bin_counts_ptr": bins if counted else None,
            "output_bin_counts_stride": bins.stride(0) if counted else 0,
            "sampled_tokens_ptr": sampled,
            "sampled_tokens_stride": sampled.stride(0),
            "num_sampled_ptr": counts,
            "num_rejected_ptr": batch.integers(0, k + 1, requests),
            "query_start_loc_ptr": tensor(batch.query_start) if has_queries else None,
            "all_token_ids_ptr": tokens,
            "all_token_ids_stride": tokens.stride(0),
            "total_len_ptr": batch.integers(1, 60, batch.slot_count),
        },
    )


@few
@given(SEEDS, REQUESTS, DRAFTS)
def test_drafts_are_gathered_by_row(seed, requests, k):
    batch = Batch(seed, requests, k)
    slots, places = batch.expanded
    positions = batch.integers(0, 60, batch.tokens, dtype=torch.int64)
    compare(
        "gather_draft_sampled",
        (1,),
        {
            "draft_sampled_ptr": batch.garbage(batch.logits + 2),
            "pos_ptr": batch.garbage(batch.logits + 2, dtype=torch.int64),
            "input_ids_ptr": batch.integers(3, 300, batch.tokens),
            "positions_ptr": positions,
            "logits_indices_ptr": batch.integers(0, batch.tokens, batch.logits, dtype=torch.int64),
            "expanded_idx_mapping_ptr": slots,
            "expanded_local_pos_ptr": places,
            "prefill_len_ptr": tensor(batch.prefill),
            "num_logits": batch.logits,
            "BLOCK_SIZE": 128,
        },
    )


@few
@given(SEEDS, REQUESTS, DRAFTS)
def test_sampled_tokens_are_flattened(seed, requests, k):
    batch = Batch(seed, requests, k)
    sampled = batch.integers(3, 300, requests, k + 1, dtype=torch.int64)
    compare(
        "flatten_sampled",
        (requests,),
        {
            "flat_sampled_ptr": batch.garbage(batch.logits + 2, dtype=torch.int64),
            "sampled_ptr": sampled,
            "sampled_stride": sampled.stride(0),
            "num_sampled_ptr": torch.from_numpy(batch.rng.integers(0, batch.rows + 1).astype("int32")),
            "cu_num_logits_ptr": tensor(batch.cu_logits),
        },
    )


@few
@given(SEEDS, REQUESTS, st.integers(1, 8), st.booleans(), st.sampled_from([1, 4, 16]))
def test_draft_step_is_laid_out(seed, requests, k, from_anchor, block_size):
    batch = Batch(seed, requests, k)
    rng = batch.rng
    query = k if from_anchor else k + 1
    max_requests, max_tokens, max_len = batch.slot_count + 1, batch.slot_count * 60, 56
    table = batch.integers(0, 6, requests, 60 // block_size + 1)
    rejected = torch.from_numpy(rng.integers(0, batch.queries).astype("int32"))
    samples = max_requests * k
    positions = torch.cat(
        [
            torch.arange(int(batch.computed[slot]), int(batch.computed[slot]) + int(count), dtype=torch.int64)
            for slot, count in zip(batch.slots, batch.queries, strict=True)
        ]
    )
    longest = int(batch.queries.max()) + query
    left = compare(
        "prepare_dflash_inputs",
        (requests, -(-longest // 8)),
        {
            "out_input_ids_ptr": batch.garbage(max_tokens),
            "out_query_positions_ptr": batch.garbage(max_tokens, dtype=torch.int64),
            "out_query_start_loc_ptr": batch.garbage(max_requests + 2),
            "out_seq_lens_ptr": batch.garbage(max_requests + 1),
            "out_query_slot_mapping_ptr": batch.garbage(max_tokens + 2, dtype=torch.int64),
            "out_context_positions_ptr": batch.garbage(max_tokens, dtype=torch.int64),
            "out_context_slot_mapping_ptr": batch.garbage(max_tokens, dtype=torch.int64),
            "out_sample_indices_ptr": batch.garbage(samples + 2, dtype=torch.int64),
            "out_sample_pos_ptr": batch.garbage(samples + 2, dtype=torch.int64),
            "out_sample_idx_mapping_ptr": batch.garbage(samples + 2, dtype=torch.int64),
            "out_temperature_ptr": batch.garbage(batch.slot_count, dtype=torch.float32),
            "out_seeds_ptr": batch.garbage(batch.slot_count, dtype=torch.int64),
            "target_positions_ptr": positions,
            "target_query_start_loc_ptr": tensor(batch.query_start),
            "idx_mapping_ptr": tensor(batch.slots),
            "last_sampled_ptr": batch.integers(3, 300, batch.slot_count, 1, dtype=torch.int64),
            "next_prefill_tokens_ptr": batch.integers(300, 600, batch.slot_count),
            "num_sampled_ptr": batch.integers(0, 3, requests),
            "num_rejected_ptr": rejected,
            "temperature_ptr": torch.rand(batch.slot_count),
            "seeds_ptr": batch.integers(-(2**62), 2**62, batch.slot_count, dtype=torch.int64),
            "block_table_ptr": table,
            "block_table_stride": table.stride(0),
            "parallel_drafting_token_id": 2,
            "block_size": block_size,
            "num_query_per_req": query,
            "num_speculative_steps": k,
            "max_num_reqs": max_requests,
            "max_num_tokens": max_tokens,
            "max_model_len": max_len,
            "cp_rank": 0,
            "SAMPLE_FROM_ANCHOR": from_anchor,
            "PAD_SLOT_ID": -1,
            "CP_SIZE": 1,
            "CP_INTERLEAVE": 1,
            "BLOCK_SIZE": 8,
        },
    )
    assert left["out_query_start_loc_ptr"][max_requests] == requests * query


@pytest.mark.parametrize("name", ["prepare_dflash_inputs", "compute_slot_mappings"])
def test_context_parallelism_is_declined(name):
    from pairs import TWINS, parameters

    from dspark_deploy.plugin.cpu_engine.twins import install
    from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED

    arguments = {key: 2 if key == "CP_SIZE" else 1 for key in parameters(name)}
    assert install.function(TWINS[name])((1, 2), **arguments) is DECLINED
