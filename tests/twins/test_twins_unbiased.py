"""With a temperature, text with speculation is distributed as text without it, through the twins.

A language of five tokens, each depending on the one before: the target's and the draft's tables are known,
so the distribution of every three tokens is known too. vLLM's own samplers draft, verify and redraw, for
thousands of requests; what a step leaves open is continued from the target's table. vLLM promises this for
greedy drafts as well, which it treats as a draft that is certain of its token: lossless, if less accepted.
`synthetic` acceptance promises nothing of the kind, and is the proof that the test can fail.
"""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from pairs import installed
from scipy import stats

from dspark_deploy.plugin.cpu_engine.twins import philox

VOCAB, STEPS, REQUESTS, TEMPERATURE = 5, 2, 20_000, 0.7
IMPOSSIBLE = 1e-5  # a p-value below it, in one of some twenty tests whose seeds are fixed, is a bias


def tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits by previous token: the target's, and a draft's that agrees with it roughly."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)
    return target, target + rng.normal(0, 0.5, target.shape).astype(np.float32)


def probabilities(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(np.float64) / TEMPERATURE)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def without_speculation(seed: int, steps: int = STEPS + 1) -> np.ndarray:
    """Tokens [requests, steps] from vLLM's sampler, one step at a time, from token 0 on."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

    target, _ = tables(seed)
    slots = torch.arange(REQUESTS)
    temperature = torch.full((REQUESTS,), TEMPERATURE)
    seeds = torch.from_numpy(np.random.default_rng(seed).integers(-(2**62), 2**62, REQUESTS))
    tokens = [torch.zeros(REQUESTS, dtype=torch.int64)]
    for step in range(steps):
        logits = torch.from_numpy(target)[tokens[-1]].clone()
        apply_temperature(logits, slots, temperature)
        positions = torch.full((REQUESTS,), 10 + step)
        tokens.append(
            gumbel_sample(
                logits, slots, temperature, seeds, positions, apply_temperature=False, is_drafting=False
            )
        )
    return torch.stack(tokens[1:], dim=1).numpy()


def with_speculation(seed: int, probabilistic: bool, method: str) -> tuple[np.ndarray, float]:
    """Tokens [requests, STEPS + 1] of one drafted and verified step, continued from the target's table.

    Also the mean number of tokens that the step itself yielded.
    """
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    target, draft = (torch.from_numpy(table) for table in tables(seed))
    slots = torch.arange(REQUESTS)
    temperature = torch.full((REQUESTS,), TEMPERATURE)
    seeds = torch.from_numpy(np.random.default_rng(seed + 1000).integers(-(2**62), 2**62, REQUESTS))
    cache = torch.zeros(REQUESTS, STEPS, VOCAB)
    tokens = [torch.zeros(REQUESTS, dtype=torch.int64)]
    for step in range(STEPS):
        logits = draft[tokens[-1]]
        if probabilistic:
            drawn = gumbel_sample(
                logits, slots, temperature, seeds, torch.full((REQUESTS,), 10 + step),
                apply_temperature=True, is_drafting=True,
                logits_cache=cache, logits_cache_col=torch.tensor(step, dtype=torch.int32),
            )  # fmt: skip
        else:
            drawn = logits.argmax(dim=-1)
        tokens.append(drawn)
    drafted = torch.stack(tokens, dim=1)
    rows = REQUESTS * (STEPS + 1)
    expanded = slots.repeat_interleave(STEPS + 1)
    logits = target[drafted.reshape(-1)].clone()
    apply_temperature(logits, expanded, temperature)
    sampled, counts = rejection_sample(
        logits,
        cache if probabilistic else None,
        drafted.reshape(-1).to(torch.int32),
        torch.arange(0, rows + 1, STEPS + 1, dtype=torch.int32),
        torch.arange(10, 10 + STEPS + 1).repeat(REQUESTS),
        slots,
        expanded,
        torch.arange(STEPS + 1, dtype=torch.int32).repeat(REQUESTS),
        temperature,
        seeds,
        STEPS,
        synthetic_conditional_rates=torch.full((STEPS,), 0.9) if method == "synthetic" else None,
        use_block_verification=method == "block",
    )
    text, lengths = sampled.numpy().copy(), counts.numpy()
    table = probabilities(target.numpy()).cumsum(axis=1)
    rng = np.random.default_rng(seed + 2000)
    for place in range(1, STEPS + 1):
        open_ended = np.flatnonzero(lengths <= place)
        draws = rng.random(len(open_ended))[:, None]
        text[open_ended, place] = (draws > table[text[open_ended, place - 1]]).sum(axis=1)
    return text, float(lengths.mean())


def p_value(seed: int, text: np.ndarray) -> float:
    """Of a chi-squared test of all token triples against the target's own distribution."""
    chances = probabilities(tables(seed)[0])
    triples = list(itertools.product(range(VOCAB), repeat=STEPS + 1))
    expected = np.array([np.prod([chances[a, b] for a, b in itertools.pairwise((0, *t))]) for t in triples])
    codes = text @ (VOCAB ** np.arange(STEPS, -1, -1))
    observed = np.bincount(codes, minlength=len(triples)).astype(float)
    # Cells too rare for the approximation are tested as one.
    rare = expected * len(text) < 10
    cells = [np.append(values[~rare], values[rare].sum()) for values in (observed, expected * len(text))]
    return float(stats.chisquare(*cells).pvalue)


SEEDS = [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("probabilistic", [False, True], ids=["greedy", "probabilistic"])
def test_speculation_changes_no_distribution(seed, method, probabilistic):
    with installed():
        text, length = with_speculation(seed, probabilistic, method)
        plain = without_speculation(seed)
    assert 1.2 < length < STEPS + 1  # drafts were both accepted and rejected
    assert p_value(seed, text) > IMPOSSIBLE
    codes = [tokens @ (VOCAB ** np.arange(STEPS, -1, -1)) for tokens in (text, plain)]
    counts = np.stack([np.bincount(code, minlength=VOCAB ** (STEPS + 1)) for code in codes])
    counts = counts[:, counts.sum(axis=0) >= 20]
    assert stats.chi2_contingency(counts).pvalue > IMPOSSIBLE


@pytest.mark.parametrize("seed", SEEDS)
def test_sampling_without_speculation_is_unbiased(seed):
    with installed():
        assert p_value(seed, without_speculation(seed)) > IMPOSSIBLE


def test_block_verification_accepts_more_than_the_ratio_test():
    with installed():
        lengths = [with_speculation(1, True, method)[1] for method in ("standard", "block")]
    assert lengths[1] > lengths[0]


def test_a_bias_is_noticed():
    with installed():
        text, _ = with_speculation(1, True, "synthetic")
        assert p_value(1, text) < IMPOSSIBLE
        uniform = philox.uniform
        with mock.patch.object(philox, "uniform", lambda *args: uniform(*args) * np.float32(0.9)):
            text, _ = with_speculation(1, False, "standard")
        assert p_value(1, text) < IMPOSSIBLE
