"""The twins of verification equal vLLM's kernels, byte for byte, whenever `rejection_sample` launches one."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import SEEDS, TWINS, Compared, few, fewer, verification_inputs

NAMES = [
    name
    for name, twin in TWINS.items()
    if twin.kernel.startswith("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils.")
]
VOCABULARIES = st.sampled_from([3, 64, 130, 352, 1000, 1024, 3000])
TEMPERATURES = st.sampled_from([[0.0], [1.0], [0.7], [0.0, 1.0, 0.3, 1.7]])


@contextmanager
def compared(names=NAMES):
    """vLLM's rejection sampler with the launches of `names` compared; yields its module and the launches."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as module

    launched: list[str] = []
    with mock.patch.multiple(
        module, **{TWINS[name].kernel.rsplit(".", 1)[1]: Compared(name, launched) for name in names}
    ):
        yield module, launched


@few
@given(
    SEEDS, st.integers(1, 8), st.integers(1, 8), VOCABULARIES, st.booleans(), st.booleans(), TEMPERATURES,
    st.sampled_from(["standard", "block", "synthetic"]), st.booleans(),
)  # fmt: skip
def test_every_launch(seed, requests, k, vocab, drafted, halves, temperatures, method, double):
    batch, arguments = verification_inputs(seed, requests, k, vocab, drafted, halves, temperatures)
    rates = torch.from_numpy(batch.rng.random(k).astype("float32")) if method == "synthetic" else None
    with compared() as (module, launched):
        module.rejection_sample(
            **arguments,
            synthetic_conditional_rates=rates,
            use_fp64=double,
            use_block_verification=method == "block",
        )
    expected = set(NAMES)
    if method != "block":
        expected -= {"cumulative_log_p", "local_residual_mass"}
    elif not drafted:
        expected -= {"local_residual_mass"}
    assert set(launched) == expected


@fewer
@given(
    SEEDS, st.integers(1, 3), st.integers(1, 4), st.sampled_from([8192, 9000, 20000, 40000]), st.booleans()
)
def test_vocabularies_of_several_blocks(seed, requests, k, vocab, block):
    _, arguments = verification_inputs(seed, requests, k, vocab, True, False, [0.0, 0.8])
    with compared() as (module, launched):
        module.rejection_sample(**arguments, use_block_verification=block)
    assert "rejection" in launched


@few
@given(SEEDS, st.integers(1, 4), st.booleans())
def test_missing_logits(seed, requests, block):
    """NaN counts as missing where the greedy path reduces; rows of the ratio test with NaN reject."""
    batch, arguments = verification_inputs(seed, requests, 3, 200, True, False, [0.0, 0.9])
    holes = torch.from_numpy(batch.rng.random(arguments["target_logits"].shape) < 0.05)
    arguments["target_logits"][holes] = float("nan")
    with compared() as (module, launched):
        module.rejection_sample(**arguments, use_block_verification=block)
    assert "resample" in launched


def test_watermarks_are_declined():
    from pairs import parameters

    from dspark_deploy.plugin.cpu_engine.twins import install
    from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED

    arguments = dict.fromkeys(parameters("resample")) | {"WATERMARK": True}
    assert install.function(TWINS["resample"])((1, 1), **arguments) is DECLINED


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_twin_is_noticed(name):
    """The comparison itself: one bit more in one output, and it fails."""
    from dspark_deploy.plugin.cpu_engine.twins import install

    ours = install.function(TWINS[name])

    def changed(grid, *args, **kwargs):
        ours(grid, *args, **kwargs)
        args[0].view(torch.uint8).reshape(-1)[-1] ^= 1

    _, arguments = verification_inputs(7, 4, 3, 64, True, False, [0.0, 0.9])
    with (
        mock.patch.object(install, "function", lambda twin: changed),
        compared([name]) as (module, launched),
        pytest.raises(AssertionError, match="differs in 1 bytes"),
    ):
        module.rejection_sample(**arguments, use_block_verification=True)
    assert not launched
