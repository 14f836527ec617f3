"""vLLM's adaptive verification, on vLLM's own classes: what a CPU without CUDA graphs can show of it.

An engine refuses adaptive verification here, since it asks for full CUDA graphs. Its arithmetic needs none:
cost tables, the choice of a budget and its spread over the requests are run below on the real manager, with
two stand-ins: cost curves are given instead of profiled, and the ranking runs eagerly instead of compiled.
What stays untested without a GPU is the profile that the curves come from, and the replay of graphs.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import SEEDS, few, installed


@pytest.fixture(scope="module")
def adaptive():
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as module

    with mock.patch.object(module, "_assign_draft_token_budget_compiled", module._assign_draft_token_budget):
        yield module


def test_costs_are_steps_below_the_capture_limit_and_smooth_above(adaptive):
    draft, verify = adaptive.build_cost_tables_from_curves(
        [(1, 2.0), (4, 3.0)], [(4, 10.0), (8, 12.0), (16, 20.0), (32, 40.0)], 8, 40, cudagraph_limit=8
    )
    assert verify[1] == verify[4] == 10.0  # padded to the captured size
    assert verify[5] == verify[8] == 12.0
    assert verify[9] == 20.0  # past the limit, never blended with the last captured size
    assert verify[24] == 30.0
    assert verify[40] == pytest.approx(50.0)  # the last slope goes on
    assert draft[2] == 3.0
    assert draft[8] == pytest.approx(3.0 + 4 / 3)


def test_costs_never_fall_with_size(adaptive):
    draft, verify = adaptive.build_cost_tables_from_curves(
        [(1, 2.0), (4, 1.0)], [(1, 5.0), (8, 4.0), (16, 9.0)], 8, 20
    )
    assert np.all(np.diff(verify) >= 0)
    assert np.all(np.diff(draft) >= 0)


@few
@given(SEEDS, st.integers(1, 8), st.integers(1, 7))
def test_the_budget_goes_to_the_likeliest_drafts(adaptive, seed, requests, k):
    rng = np.random.default_rng(seed)
    confidence = torch.from_numpy(rng.random((requests + 2, k)).astype(np.float32))
    slots = torch.from_numpy(rng.permutation(requests + 2)[:requests])
    scheduled = torch.from_numpy(rng.integers(0, k + 1, requests).astype(np.int32))
    total = int(scheduled.sum())
    if total < 2:
        return
    budget = int(rng.integers(1, total))
    admitted = scheduled.clone()
    adaptive._assign_draft_token_budget(confidence, slots, admitted, budget, k)
    assert int(admitted.sum()) == budget
    assert (admitted <= scheduled).all()
    survival = confidence[slots].cumprod(dim=1)
    taken = [survival[r, s] for r in range(requests) for s in range(admitted[r])]
    left = [survival[r, s] for r in range(requests) for s in range(admitted[r], scheduled[r])]
    assert min(taken) >= max(left)


class Scene:
    """A manager with `requests` decoding requests, their drafts scheduled and their confidences recorded."""

    def __init__(self, adaptive, seed: int, requests: int, k: int, slope: float) -> None:
        from vllm.v1.worker.gpu.states import RequestState

        self.k, self.requests = k, requests
        rng = np.random.default_rng(seed)
        states = RequestState(
            max_num_reqs=requests + 2,
            max_model_len=64,
            max_num_batched_tokens=256,
            num_speculative_steps=k,
            vocab_size=32,
            device=torch.device("cpu"),
        )
        self.manager = adaptive.AdaptiveVerificationManager(
            states, torch.zeros(requests + 3, dtype=torch.int32), 1, max_total_logits=256
        )
        self.ids = [f"r{number}" for number in range(requests)]
        for name in self.ids:
            states.add_request(name, 4, [1, 2, 3, 4], 0, 32)
            slot = states.req_id_to_index[name]
            self.manager.add_request(slot)
            states.num_computed_tokens_np[slot] = 4
        self.slots = torch.tensor([states.req_id_to_index[name] for name in self.ids])
        self.confidence = torch.from_numpy(rng.random((requests, k)).astype(np.float32))
        batch = mock.Mock(num_reqs=requests, idx_mapping=self.slots)
        for _ in range(2):  # a budget reads the confidences of the step before
            self.manager.record_confidences(self.confidence, batch)
        self.drafts = np.sort(rng.integers(1, k + 1, requests))[::-1].astype(np.int32)
        sizes = np.arange(1, 257)
        curve = [(int(size), 5.0 + slope * float(size)) for size in sizes]
        self.manager.cost_tables = adaptive.build_cost_tables_from_curves(
            [(1, 2.0)], curve, requests + 2, 256
        )

    def choose(self) -> int:
        """The draft budget that the manager chooses."""
        scheduled = {name: 1 + int(count) for name, count in zip(self.ids, self.drafts, strict=True)}
        drafted = {name: [7] * int(count) for name, count in zip(self.ids, self.drafts, strict=True)}
        return self.manager.get_num_tokens(scheduled, drafted) - self.requests


@few
@given(SEEDS, st.integers(1, 8), st.integers(1, 7), st.sampled_from([0.0, 0.05, 0.5, 5.0]))
def test_the_budget_is_the_best_rate(adaptive, seed, requests, k, slope):
    scene = Scene(adaptive, seed, requests, k, slope)
    budget = scene.choose()
    survival = scene.confidence.double().cumprod(dim=1).numpy()
    scores = sorted((survival[r, s] for r in range(requests) for s in range(scene.drafts[r])), reverse=True)
    rates = [
        (requests + sum(scores[:count])) / (2.0 + 5.0 + slope * (requests + count))
        for count in range(len(scores) + 1)
    ]
    assert rates[budget] == pytest.approx(max(rates))
    if slope == 0.0:
        assert budget == len(scores)  # drafts that cost nothing are all verified


@few
@given(SEEDS, st.integers(1, 8), st.integers(1, 7), st.sampled_from([0.05, 0.5, 5.0]))
def test_the_batch_is_cut_to_the_budget(adaptive, seed, requests, k, slope):
    """And what is left is a layout that the twins take: as many rows of logits as there are drafts left."""
    from vllm.v1.worker.gpu.input_batch import expand_idx_mapping

    scene = Scene(adaptive, seed, requests, k, slope)
    budget = scene.choose()
    logits_before = np.concatenate([[0], np.cumsum(scene.drafts + 1)]).astype(np.int32)
    on_cpu, _ = scene.manager.compact_batch(scene.drafts, scene.drafts + 1, logits_before)
    assert int(on_cpu.sum()) == requests + budget
    cu_logits, starts, total = scene.manager.reallocate_drafts(scene.ids, scene.slots)
    assert total == budget
    assert int(cu_logits[-1]) == requests + budget
    assert torch.equal(starts[: requests + 1], cu_logits)
    assert starts[requests:].eq(requests + budget).all()
    rows = torch.diff(cu_logits)
    assert ((rows >= 1) & (rows <= torch.from_numpy(scene.drafts + 1))).all()
    with installed():
        slots, places = expand_idx_mapping(scene.slots, requests + budget, cu_logits, k + 1)
    assert torch.equal(slots, scene.slots.repeat_interleave(rows))
    assert torch.equal(places, torch.cat([torch.arange(int(row), dtype=torch.int32) for row in rows]))


def test_a_new_request_is_trusted(adaptive):
    """Its confidences are 1 until its first drafts are rated, so that it isn't starved of verification."""
    scene = Scene(adaptive, 3, 2, 4, 0.5)
    scene.manager.add_request(int(scene.slots[0]))
    assert scene.manager._confidence_probs[scene.slots[0]].eq(1.0).all()
    stale = scene.manager._stale_confidences[scene.manager._stale_idx].np
    assert np.all(stale[int(scene.slots[0])] == 1.0)
