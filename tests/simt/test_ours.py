"""Our kernels: right in every schedule, wave and size; each barrier matters, or is shown not to."""

from __future__ import annotations

import pytest

from dspark_deploy.kernels import mhc_pre
from dspark_deploy.kernels.mhc_pre import HC
from tests.simt import cases, emulator, matrix
from tests.simt.generate import WAVE, Job

pytestmark = pytest.mark.timeout(600)
HIDDEN = 1024
MIX = {threads: mhc_pre.mix_parameters(1, HC * HIDDEN, cases.CONSTANTS, threads) for threads in (64, 128)}
NORM = mhc_pre.collapse_parameters(HIDDEN, cases.CONSTANTS.norm_eps, mhc_pre.plan(HIDDEN, True))

# Kernel, architecture, and the number of the barrier that is removed: it matters.
MATTER = [
    (Job("ours", "mix", "gfx1100", HIDDEN, MIX[64]), 0),
    (Job("ours", "mix", "gfx942", HIDDEN, MIX[128]), 0),
    (Job("ours", "mix", "gfx950", HIDDEN, MIX[128]), 0),
    *((Job("ours", "collapse", arch, HIDDEN, NORM), number) for arch in WAVE for number in (0, 1)),
]
# Where a block is a single wave, its lockstep orders what the barrier would.
ONE_WAVE = [Job("ours", "mix", arch, HIDDEN, MIX[64]) for arch in ("gfx942", "gfx950")]


@pytest.mark.parametrize("job", matrix.OURS, ids=str)
def test_right_in_every_schedule(job: Job) -> None:
    kernel = emulator.Kernel(job)
    for tokens in matrix.TOKENS:
        for schedule in emulator.SCHEDULES:
            case = cases.case(job.kernel, job.hidden, tokens, job.params)
            report = kernel.run(case, WAVE[job.arch], schedule)
            for name, error in cases.errors(case).items():
                assert error.right, (str(job), tokens, schedule, name, error)
            assert not report.faults(), (str(job), tokens, schedule, report.faults())
            assert not report.uninitialised and not report.wave_synchronous, (str(job), tokens, schedule)
            assert not report.divergent_barriers, (str(job), tokens, schedule, "reached by the whole block")


def test_no_lane_reads_another_lanes_register() -> None:
    """What makes a kernel depend on the width of a wave: shuffles, and TileLang's reductions over them."""
    for job in matrix.OURS:
        text = job.stem().with_suffix(".hip").read_text()
        assert "shfl" not in text and "AllReduce" not in text and "warp_reduce" not in text, str(job)


@pytest.mark.parametrize(("job", "number"), MATTER, ids=str)
def test_removing_a_barrier_is_caught(job: Job, number: int) -> None:
    kernel = emulator.Kernel(job, drop=(number,))
    wrong = 0
    for schedule in emulator.SCHEDULES:
        case = cases.case(job.kernel, job.hidden, 8, job.params)
        report = kernel.run(case, WAVE[job.arch], schedule)
        assert report.races > 0, (str(job), number, schedule)
        wrong += not all(error.right for error in cases.errors(case).values())
    assert wrong > 0, f"{job}: no schedule shows what barrier {number} is for"


@pytest.mark.parametrize("job", ONE_WAVE, ids=str)
def test_in_a_block_of_one_wave_the_barrier_is_redundant(job: Job) -> None:
    kernel = emulator.Kernel(job, drop=(0,))
    for schedule in emulator.SCHEDULES:
        case = cases.case(job.kernel, job.hidden, 8, job.params)
        report = kernel.run(case, WAVE[job.arch], schedule)
        assert report.races == 0 and report.wave_synchronous > 0, (str(job), schedule)
        assert all(error.right for error in cases.errors(case).values()), (str(job), schedule)


def test_barriers_are_all_accounted_for() -> None:
    for job in matrix.OURS:
        norm = job.params.get("with_norm", False)
        expected = 1 if job.kernel == "mix" else 2 if norm else 0
        assert emulator.barriers(job) == expected, (str(job), emulator.barriers(job))
