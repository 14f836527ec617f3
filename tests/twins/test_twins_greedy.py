"""The shortcuts of a greedy step give what vLLM's own functions give, and leave every other case to them."""

from __future__ import annotations

import dataclasses
import inspect
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pairs import SEEDS, few, installed, verification_inputs

from dspark_deploy.plugin.cpu_engine.twins import SHORTCUTS, greedy, install
from dspark_deploy.plugin.registry import State


def originals():
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    return rejection_sample, DSparkSpeculator._sample_sequential


@few
@given(
    SEEDS, st.integers(1, 9), st.integers(1, 8), st.sampled_from([3, 352, 1500, 9000]),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_greedy_rejection(seed, requests, k, vocab, drafted, halves, narrow):
    original, _ = originals()
    _, arguments = verification_inputs(seed, requests, k, vocab, drafted, halves, [0.0])
    if drafted and narrow:
        arguments["draft_logits"] = arguments["draft_logits"][:, :, : vocab - 1]
    refuse = mock.Mock(side_effect=AssertionError("the original was called"))
    tokens, counts = greedy.rejection_sample(refuse)(
        **arguments, use_fp64=False, use_block_verification=False
    )
    with installed():
        expected, numbers = original(**arguments)
    assert torch.equal(counts, numbers)
    assert (tokens.dtype, counts.dtype, tokens.shape) == (expected.dtype, numbers.dtype, expected.shape)
    for row, count in enumerate(numbers.tolist()):
        assert torch.equal(tokens[row, :count], expected[row, :count])


@pytest.mark.parametrize("case", ["sampled", "mixed", "synthetic", "watermark", "nan"])
def test_other_rejection_goes_to_vllm(case):
    temperatures = {"sampled": [0.7], "mixed": [0.0, 0.7]}.get(case, [0.0])
    _, arguments = verification_inputs(3, 8, 3, 64, False, False, temperatures)
    if case == "synthetic":
        arguments["synthetic_conditional_rates"] = torch.ones(3)
    if case == "watermark":
        arguments["contexts"] = torch.zeros(1)
    if case == "nan":
        arguments["target_logits"][0, 5] = float("nan")
    original = mock.Mock(return_value="theirs")
    assert greedy.rejection_sample(original)(**arguments) == "theirs"
    ((*positional,), keywords) = original.call_args
    names = list(inspect.signature(originals()[0]).parameters)
    seen = dict(zip(names, positional, strict=False)) | keywords
    assert {name: value for name, value in seen.items() if value is not None} == {
        name: value for name, value in arguments.items() if value is not None
    }


class Head:
    """A Markov head as vLLM's, with plain tensors where it has parallel layers."""

    def __init__(self, vocab: int, rank: int) -> None:
        self.markov_w1 = torch.nn.Embedding(vocab, rank)
        self.markov_w2 = mock.Mock(weight=torch.randn(vocab, rank), tp_size=1)
        self.markov_w2.quant_method = type("UnquantizedEmbeddingMethod", (), {})()
        self.markov_w2.cpu_linear = F.linear


Head.__name__ = "DSparkMarkovHead"


def speculator(seed: int, requests: int, k: int, vocab: int) -> mock.Mock:
    """What `_sample_sequential` reads of a speculator, with a model that answers in vLLM's words."""
    torch.manual_seed(seed)
    head = Head(vocab, 4)
    processor = mock.Mock(scale=1.0, soft_cap=None, head_dtype=None, org_vocab_size=vocab)
    output = torch.randn(vocab, 8)
    model = mock.Mock(logits_processor=processor, draft_id_to_target_id=None)
    model.model.markov_head = head
    model.compute_draft_logits = lambda hidden: F.linear(hidden, output)
    model.markov_embed = head.markov_w1
    model.markov_bias = lambda embedded: F.linear(embedded, head.markov_w2.weight)
    model.map_draft_to_target = lambda ids: ids
    made = mock.Mock(
        model=model,
        num_speculative_steps=k,
        draft_logits=None,
        _draft_topk=None,
        use_confidence_head=False,
        acceptance_estimator=None,
        sample_indices=torch.randperm((requests + 2) * k),
        sample_idx_mapping=torch.zeros((requests + 2) * k, dtype=torch.int64),
        sample_pos=torch.zeros((requests + 2) * k, dtype=torch.int64),
        _anchor_idx=torch.arange(requests + 2) * k,
        _step_cols=torch.arange(k),
        draft_tokens=torch.full((requests + 2, k), -7),
    )
    made.input_buffers.input_ids = torch.randint(0, vocab, ((requests + 2) * k,), dtype=torch.int32)
    made._sample_logits = lambda logits, *_: logits.argmax(dim=-1)
    return made


@few
@given(SEEDS, st.integers(1, 8), st.integers(1, 8), st.sampled_from([5, 352]))
@torch.no_grad()
def test_greedy_drafts(seed, requests, k, vocab):
    _, original = originals()
    hidden = torch.randn((requests + 2) * k, 8, generator=torch.Generator().manual_seed(seed))
    theirs, ours = (speculator(seed, requests, k, vocab) for _ in range(2))
    original(theirs, requests, hidden)
    refuse = mock.Mock(side_effect=AssertionError("the original was called"))
    greedy.sample_sequential(refuse)(ours, requests, hidden)
    assert torch.equal(theirs.draft_tokens, ours.draft_tokens)
    assert ours.draft_tokens[requests:].eq(-7).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: setattr(s, "draft_logits", torch.zeros(1)),
        lambda s: setattr(s, "_draft_topk", 8),
        lambda s: setattr(s, "use_confidence_head", True),
        lambda s: setattr(s, "acceptance_estimator", object()),
        lambda s: setattr(s.model, "draft_id_to_target_id", torch.zeros(1)),
        lambda s: setattr(s.model.logits_processor, "scale", 0.5),
        lambda s: setattr(s.model.logits_processor, "soft_cap", 30.0),
        lambda s: setattr(s.model.logits_processor, "head_dtype", torch.float64),
        lambda s: setattr(s.model.model, "markov_head", object()),
        lambda s: setattr(s.model.model.markov_head.markov_w2, "tp_size", 2),
        lambda s: setattr(s.model.model.markov_head.markov_w2, "quant_method", object()),
    ],
)
def test_other_drafts_go_to_vllm(change):
    made = speculator(1, 2, 3, 5)
    change(made)
    original = mock.Mock()
    greedy.sample_sequential(original)(made, 2, "hidden")
    original.assert_called_once_with(made, 2, "hidden")


@pytest.mark.parametrize("shortcut", SHORTCUTS, ids=lambda shortcut: shortcut.wrapper)
def test_a_changed_function_stays(shortcut):
    assert install._examine_shortcut(shortcut).state is None
    verdict = install._examine_shortcut(dataclasses.replace(shortcut, fingerprint="0" * 16))
    assert verdict.state is State.REFUSED
    assert shortcut.fingerprint in verdict.reason
    gone = dataclasses.replace(shortcut, function=f"{shortcut.function}_gone")
    assert install._examine_shortcut(gone).reason == "vLLM has no such function"
