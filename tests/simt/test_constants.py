"""What random inputs and equal constants of 1e-6 don't show: each constant, rows at the edges, each step.

Constants are large and distinct; among the rows are one of zeros, one of NaN, a small one and one with a
logit of 100. Each of `mutants` is a mistake in our kernels' text, and must be noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark_deploy.kernels import mhc_pre
from dspark_deploy.kernels.mhc_pre import HC
from tests.simt import cases, emulator, matrix
from tests.simt.emulator import Schedule
from tests.simt.generate import Job
from tests.simt.mutants import MUTANTS

pytestmark = pytest.mark.timeout(600)
HIDDEN, TOKENS = 1024, 8
DISTINCT = mhc_pre.Constants(
    rms_eps=0.5, pre_eps=0.25, sinkhorn_eps=0.125, post_mult=1.5, sinkhorn_repeat=2, norm_eps=0.0625
)
ARCH = "gfx942"
EDGES: dict[str, Any] = {"edge_rows": True}


def _mix(repeat: int, mutant: str = "") -> Job:
    given = replace(DISTINCT, sinkhorn_repeat=repeat)
    return Job("ours", "mix", ARCH, HIDDEN, mhc_pre.mix_parameters(1, HC * HIDDEN, given), mutant)


def _collapse(norm_eps: float, mutant: str = "") -> Job:
    block = mhc_pre.plan(HIDDEN, True)
    return Job("ours", "collapse", ARCH, HIDDEN, mhc_pre.collapse_parameters(HIDDEN, norm_eps, block), mutant)


OURS = [*(_mix(repeat) for repeat in (1, 2, 20)), _collapse(DISTINCT.norm_eps), _collapse(1e-6)]
VLLM = matrix.upstream(
    matrix.FIXED,
    "pre_with_norm",
    "gfx950",
    HIDDEN,
    rms_eps=DISTINCT.rms_eps,
    hc_pre_eps=DISTINCT.pre_eps,
    hc_sinkhorn_eps=DISTINCT.sinkhorn_eps,
    hc_post_mult_value=DISTINCT.post_mult,
    sinkhorn_repeat=DISTINCT.sinkhorn_repeat,
    norm_eps=DISTINCT.norm_eps,
)
BROKEN = [
    _mix(20 if "guard" in name else 2, name)
    if kernel == "mix"
    else _collapse(1e-6 if "rounding" in name else DISTINCT.norm_eps, name)
    for name, (kernel, _, _) in MUTANTS.items()
]


def faults(job: Job) -> Iterator[str]:
    """What is wrong with a kernel on every row that is checked here; nothing for a right one."""
    kernel = emulator.Kernel(job)
    case = cases.case(job.kernel, job.hidden, TOKENS, job.params | EDGES)
    report = kernel.run(case, 64, Schedule())
    yield from (f"{name}: {error}" for name, error in cases.errors(case).items() if not error.right)
    yield from report.faults()
    if (
        job.kernel == "mix"
        and job.params["sinkhorn_repeat"] > 2
        and _blocks(kernel, True) > _blocks(kernel) / 2
    ):
        yield "a NaN row is iterated over"
    if job.kernel == "collapse" and job.params["norm_eps"] < 1e-3:
        yield from _rounded(kernel)


def _blocks(kernel: emulator.Kernel, nan: bool = False) -> int:
    """Basic blocks of one token's launch."""
    case = cases.case("mix", HIDDEN, 1, kernel.job.params)
    if nan:
        case.inputs["gemm_mul"][:] = float("nan")
    return int(kernel.run(case, 64, Schedule()).blocks)


def _rounded(kernel: emulator.Kernel) -> Iterator[str]:
    """A row of values just below the middle between 1 and the next bf16: rounded to 1, its norm is 1."""
    case = cases.case("collapse", HIDDEN, 1, kernel.job.params)
    case.inputs["residual"][:], case.inputs["norm_weight"][:] = 1, 1
    case.inputs["pre"][:] = torch.tensor([1 + 0.99 * 2**-8, 0, 0, 0])
    kernel.run(case, 64, Schedule())
    found = case.outputs["layer_input"].values()
    if not (found == 1).all():
        yield f"layer_input is {found[0, 0]} instead of 1"


@pytest.mark.parametrize("job", [*OURS, VLLM], ids=str)
def test_constants_and_edges_are_right(job: Job) -> None:
    assert list(faults(job)) == []


@pytest.mark.parametrize("job", BROKEN, ids=lambda job: job.mutant)
def test_each_mistake_is_noticed(job: Job) -> None:
    assert list(faults(job)), job.mutant
