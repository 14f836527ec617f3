"""The emulator by itself, on kernels of a few lines: what it must see, and what it must not."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import pytest
import torch

from tests.simt import emulator
from tests.simt.cases import Case, Guarded
from tests.simt.emulator import Report, Schedule

HEAD = """#include <hip/hip_runtime.h>
#include <tl_templates/hip/reduce.h>
extern "C" __global__ void __launch_bounds__(128) test_kernel(float* __restrict__ out, int num_tokens) {
  extern __shared__ __align__(1024) float shared[];
  int t = threadIdx.x;
"""


@dataclass
class Ran:
    values: torch.Tensor
    report: Report
    guards: bool = field(default=True)


def run(body: str, wave: int = 64, shared: int = 512, threads: int = 128, **schedule: object) -> Ran:
    """One block of `threads`, `out[thread]`, and `shared` bytes of shared memory."""
    kernel = emulator.Kernel.__new__(emulator.Kernel)
    text = HEAD + body + "\n}\n"
    kernel.parameters = emulator.parameters(text)
    kernel.threads, kernel.shared_bytes = threads, shared
    kernel._library = ctypes.CDLL(str(emulator.compiled(emulator.emulated(text, kernel.parameters))))
    out = Guarded((threads,), torch.float32)
    case = Case({}, {"out": out}, {"out": torch.zeros(threads)}, (1, 1, 1), {"num_tokens": 1})
    report = kernel.run(case, wave, Schedule(**schedule))  # type: ignore[arg-type]
    return Ran(out.values(), report, out.guards_intact())


def test_a_shuffle_within_a_branch_reads_no_lane_outside_it() -> None:
    body = "float v = t; if (t >= 32) v = __shfl_xor(v, 32); out[t] = v;"
    poisoned = run(body)
    assert poisoned.report.inactive_reads == 32, poisoned.report.inactive_reads
    assert poisoned.values[32:64].isnan().all() and not poisoned.values[64:].isnan().any()
    assert (run(body, inactive="zero").values[32:64] == 0).all()
    assert (run(body, inactive="own").values[32:64] == torch.arange(32, 64)).all()


def test_a_branch_that_a_whole_wave_agrees_on_leaves_no_lane_inactive() -> None:
    ran = run("float v = t; if (t >= 64) v = __shfl_xor(v, 32); out[t] = v;")
    assert ran.report.inactive_reads == 0
    assert (ran.values[64:] == torch.arange(64, 128).bitwise_xor(torch.tensor(32))).all()


def test_a_loop_of_shuffles_sums_a_wave() -> None:
    body = "float v = 1; for (int o = warpSize / 2; o; o /= 2) v += __shfl_xor(v, o); out[t] = v;"
    for wave in (32, 64):
        ran = run(body, wave)
        assert (ran.values == wave).all(), (wave, ran.values.unique())


@pytest.mark.parametrize("waves", ["forward", "backward", "random"])
def test_a_race_is_seen_in_every_order(waves: str) -> None:
    """Thread t reads what thread 127 - t, of the other wave, wrote: right in no order without a barrier."""
    unordered = run("shared[t] = t; out[t] = shared[127 - t];", waves=waves)
    assert unordered.report.races > 0
    ordered = run("shared[t] = t; __syncthreads(); out[t] = shared[127 - t];", waves=waves)
    assert ordered.report.races == 0 and (ordered.values == 127 - torch.arange(128)).all()


def test_a_read_ahead_of_another_waves_write_is_a_race_too() -> None:
    ran = run("shared[t] = 0; __syncthreads(); float v = shared[127 - t]; shared[t] = v + 1; out[t] = v;")
    assert ran.report.races > 0
    assert ran.report.race_offset >= 0 and ran.report.race_second < 128


def test_lanes_of_one_wave_are_ordered_by_lockstep_and_that_is_counted() -> None:
    ran = run("shared[t] = t; out[t] = shared[t ^ 1];", reverse_lanes=True)
    assert ran.report.races == 0 and ran.report.wave_synchronous == 128
    assert (ran.values == torch.arange(128).bitwise_xor(torch.tensor(1))).all()


def test_shared_memory_has_bounds_and_starts_unwritten() -> None:
    ran = run("shared[t + 1] = t; __syncthreads(); out[t] = shared[t];")
    assert ran.report.out_of_bounds == 1, "thread 127 writes past the end"
    assert ran.report.uninitialised == 1, "thread 0 reads what nobody wrote"
    assert ran.values[0].isnan() and (ran.values[1:] == torch.arange(127)).all()


def test_writes_past_an_output_break_its_guard() -> None:
    assert run("out[t] = t;").guards
    assert not run("out[t + 1] = t;").guards


def test_a_barrier_in_a_divergent_branch_counts_once_for_the_wave() -> None:
    ran = run("if (t < 32) __syncthreads(); shared[t] = t; out[t] = shared[t];")
    assert ran.report.divergent_barriers == 1
    assert (ran.values == torch.arange(128)).all()


def test_tilelangs_reduction_is_right_at_offset_0_and_wrong_at_32() -> None:
    """The headers are TileLang's own: the fault is in `AllReduce` as it ships."""
    right = run("float v = 1; if (t < 64) v = tl::AllReduce<tl::SumOp, 64, 1, 0>::run(v); out[t] = v;")
    assert (right.values[:64] == 64).all() and right.report.inactive_reads == 0
    wrong = run(
        "float v = 1; if (t >= 32 && t < 96) v = tl::AllReduce<tl::SumOp, 64, 1, 32>::run(v); out[t] = v;",
        inactive="zero",
    )
    assert (wrong.values[32:96] == 32).all(), wrong.values[32:96].unique()
    assert wrong.report.inactive_reads == 64


def test_what_it_cannot_run_is_refused() -> None:
    with pytest.raises(AssertionError, match="isn't emulated"):
        run("__shared__ float fixed[4]; out[t] = fixed[0];")
