"""vLLM's kernels: right where they are right, and the known faults as they are known.

`BARRIERS` says of each barrier in vLLM 0.33.0's kernels for gfx950 whether it matters, and if not, why; the
test takes each out. A barrier matters when two waves then touch one byte of shared memory unordered, in any
schedule.
"""

from __future__ import annotations

import pytest

from tests.simt import cases, emulator, matrix
from tests.simt.emulator import SCHEDULES, Schedule
from tests.simt.generate import WAVE, Job

pytestmark = pytest.mark.timeout(600)

MATTERS = ""
SAME_WAVE = "written and read by one wave, whose lockstep orders it"
PRIVATE = "between it and the next barrier no thread reads what another wrote"
PAIR = "its neighbour does the same: without both there is a race"
BARRIERS: dict[str, tuple[str, ...]] = {
    "pre": (SAME_WAVE, MATTERS, PRIVATE),
    "pre_with_norm": (MATTERS, SAME_WAVE, PRIVATE),
    "pre_broadcast_with_norm": (MATTERS, SAME_WAVE, PRIVATE),
    "post": (),
    "fused_post_pre": (MATTERS, MATTERS, MATTERS),
    "head": (PRIVATE, MATTERS, PAIR, PAIR),
    "prenorm_gemm": (MATTERS,),
}
MUTATIONS = [
    (matrix.upstream(matrix.FIXED, kernel, "gfx950", 1024), number, reason)
    for kernel, reasons in BARRIERS.items()
    for number, reason in enumerate(reasons)
]


@pytest.mark.parametrize("job", matrix.RIGHT, ids=str)
def test_right(job: Job) -> None:
    kernel = emulator.Kernel(job)
    for tokens in matrix.TOKENS:
        for schedule in SCHEDULES:
            case = cases.case(job.kernel, job.hidden, tokens, job.params)
            report = kernel.run(case, WAVE[job.arch], schedule)
            for name, error in cases.errors(case).items():
                assert error.right, (str(job), job.params, tokens, schedule, name, error)
            assert not report.faults(), (str(job), job.params, tokens, schedule, report.faults())


@pytest.mark.parametrize("job", matrix.HALF_NORM, ids=str)
def test_a_norm_over_half_a_wave_is_off_by_the_root_of_2(job: Job) -> None:
    kernel = emulator.Kernel(job)
    for tokens in matrix.TOKENS:
        case = cases.case(job.kernel, job.hidden, tokens, job.params)
        report = kernel.run(case, 64, Schedule(inactive="zero"))
        found = cases.errors(case)
        # NRMSE is ratio - 1 at 0.41: all of the error is scale. post_mix and comb_mix are right.
        assert found["layer_input"].ratio == pytest.approx(2**0.5, abs=2e-3), (str(job), found)
        assert found["layer_input"].nrmse == pytest.approx(2**0.5 - 1, abs=1e-2), (str(job), found)
        assert found["post_mix"].right and found["comb_mix"].right, (str(job), found)
        assert report.inactive_reads == 64 * tokens, (str(job), report.inactive_reads)


def test_the_root_of_2_needs_no_assumption_about_inactive_lanes() -> None:
    """Whatever a lane that isn't active gives, it's read: poison reaches every element."""
    job = matrix.HALF_NORM[0]
    case = cases.case(job.kernel, job.hidden, 1, job.params)
    emulator.Kernel(job).run(case, 64, Schedule(inactive="poison"))
    assert cases.errors(case)["layer_input"].nans == job.hidden


@pytest.mark.parametrize("job", matrix.RACE, ids=str)
def test_on_gfx942_pre_is_wrong_when_wave_1_runs_first(job: Job) -> None:
    kernel = emulator.Kernel(job)
    found = {}
    for waves in ("forward", "backward"):
        case = cases.case(job.kernel, job.hidden, 1, job.params)
        report = kernel.run(case, 64, Schedule(waves=waves))
        found[waves] = cases.errors(case)
        assert report.races > 0, (str(job), waves, "the race is there in either order")
    assert found["forward"]["layer_input"].right, found["forward"]
    assert found["backward"]["layer_input"].nans == job.hidden // 2, found["backward"]
    case = cases.case(job.kernel, job.hidden, 1, job.params)
    kernel.run(case, 64, Schedule(waves="backward", fill=0))
    ratio = cases.errors(case)["layer_input"].ratio
    assert ratio == pytest.approx(0.7, abs=0.05), f"half of the elements are zero: {ratio}"


@pytest.mark.parametrize("job", matrix.SYNCHRONOUS, ids=str)
def test_on_gfx942_the_fixed_norm_kernels_rest_on_lockstep(job: Job) -> None:
    """Right in every schedule, but by no barrier: one wave writes the pre-mix and reads it back."""
    kernel = emulator.Kernel(job)
    for schedule in SCHEDULES:
        case = cases.case(job.kernel, job.hidden, 1, job.params)
        report = kernel.run(case, 64, schedule)
        assert all(error.right for error in cases.errors(case).values()), (str(job), schedule)
        assert report.races == 0 and report.wave_synchronous > 0, (str(job), schedule)


def test_on_a_wave_of_32_the_old_norm_kernel_leaves_shared_memory() -> None:
    job = matrix.NARROW
    case = cases.case(job.kernel, job.hidden, 1, job.params)
    report = emulator.Kernel(job).run(case, 32, Schedule())
    assert report.out_of_bounds > 0 and report.uninitialised > 0
    assert cases.errors(case)["layer_input"].nans == job.hidden


@pytest.mark.parametrize(("job", "number", "reason"), MUTATIONS, ids=str)
def test_each_barrier_matters_or_is_redundant_as_stated(job: Job, number: int, reason: str) -> None:
    kernel = emulator.Kernel(job, drop=(number,))
    for schedule in SCHEDULES:
        case = cases.case(job.kernel, job.hidden, 1, job.params)
        report = kernel.run(case, 64, schedule)
        right = all(error.right for error in cases.errors(case).values())
        if reason:
            assert right and report.races == 0, (str(job), number, reason, schedule)
        else:
            assert report.races > 0, (str(job), number, schedule)
        if reason is SAME_WAVE:
            assert report.wave_synchronous > 0, (str(job), number, schedule)


def test_the_heads_last_two_barriers_stand_for_one_another() -> None:
    job = matrix.upstream(matrix.FIXED, "head", "gfx950", 1024)
    kernel = emulator.Kernel(job, drop=(2, 3))
    case = cases.case(job.kernel, job.hidden, 1, job.params)
    assert kernel.run(case, 64, Schedule()).races > 0


def test_every_barrier_is_listed() -> None:
    for kernel, reasons in BARRIERS.items():
        job = matrix.upstream(matrix.FIXED, kernel, "gfx950", 1024)
        assert emulator.barriers(job) == len(reasons), (kernel, emulator.barriers(job))
