"""The emulator by itself, on kernels of a few lines: what it must see, and what it must not."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch

from tests.simt import emulator
from tests.simt.cases import Case, Output
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
    writes: int


def run(body: str, wave: int = 64, shared: int = 512, threads: int = 128, **schedule: object) -> Ran:
    """One block of `threads`, `out[thread]`, and `shared` bytes of shared memory."""
    kernel = emulator.Kernel.__new__(emulator.Kernel)
    text = HEAD + body + "\n}\n"
    kernel.parameters = emulator.parameters(text)
    kernel.threads, kernel.shared_bytes = threads, shared
    kernel._library = ctypes.CDLL(str(emulator.compiled(emulator.emulated(text, kernel.parameters))))
    out = Output((threads,), torch.float32)
    case = Case({}, {"out": out}, {"out": torch.zeros(threads)}, (1, 1, 1), {"num_tokens": 1})
    report = kernel.run(case, wave, Schedule(**schedule))  # type: ignore[arg-type]
    return Ran(out.values(), report, out.writes)


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


def test_every_access_outside_shared_memory_and_tensors_is_counted() -> None:
    right = run("out[t] = t;")
    assert right.report.out_of_bounds == 0 and right.writes == 128
    one = "if (t == 0) "
    for body in (
        "out[128] = 7;",
        "out[128 + 100] = 7;",
        "out[-1] = 7;",
        "((unsigned*)out)[129] = 0xffffffffu;",  # what an output is filled with
        "out[0] = out[1 << 20];",
        "shared[50000] = 7;",
        "shared[-1] = 7;",
        "out[0] = shared[128];",
        "int n = 4 * num_tokens; float x = 1; memcpy(shared + 128, &x, n);",
        "int n = 4 * num_tokens; memset(out + 128, 0, n);",
    ):
        assert run(f"out[t] = t; {one}{{ {body} }}").report.out_of_bounds == 1, body


def test_a_race_through_an_output_is_seen() -> None:
    unordered = run("out[t] = t; float y = ((volatile float*)out)[127 - t]; out[t] = y;")
    assert unordered.report.races > 0
    ordered = run("out[t] = t; __syncthreads(); float y = ((volatile float*)out)[127 - t]; shared[t] = y;")
    assert ordered.report.races == 0


def test_copies_of_variable_length_are_accesses() -> None:
    copies = "int n = 4 * num_tokens; float x = t, y; memcpy(shared + t, &x, n);"
    assert run(f"{copies} memcpy(&y, shared + 127 - t, n); out[t] = y;").report.races > 0
    ran = run(f"{copies} __syncthreads(); memcpy(&y, shared + 127 - t, n); out[t] = y;")
    assert not ran.report.faults() and (ran.values == 127 - torch.arange(128)).all()


def test_atomics_race_with_plain_accesses_and_not_with_each_other() -> None:
    start, read = "if (t == 0) shared[0] = 0; __syncthreads();", "__syncthreads(); out[t] = shared[0];"
    ran = run(f"{start} atomicAdd(shared, 1.0f); {read}")
    assert ran.report.races == 0 and ran.report.uninitialised == 0 and (ran.values == 128).all()
    assert run("if (t == 0) shared[0] = 0; atomicAdd(shared, 1.0f); out[t] = 0;").report.races > 0
    assert run(f"{start} atomicAdd(shared, 1.0f); out[t] = shared[0];").report.races > 0


@pytest.mark.parametrize("waves", ["forward", "backward", "random"])
def test_two_waves_that_write_the_same_value_do_no_harm(waves: str) -> None:
    same = run("shared[0] = 1; __syncthreads(); out[t] = shared[0];", waves=waves)
    assert same.report.races == 0 and same.report.same_value > 0 and (same.values == 1).all()
    assert run("shared[0] = t / 64; __syncthreads(); out[t] = shared[0];", waves=waves).report.races > 0


LOOPS = {
    "for": "for (int i = 0; i < 2; i++) if (t / 32 % 2 == i) v = __shfl_xor(v, 32);",
    "while": "int i = 0; while (i < 2) { if (t / 32 % 2 == i) v = __shfl_xor(v, 32); i++; }",
    "do": "int i = 0; do { if (t / 32 % 2 == i) v = __shfl_xor(v, 32); } while (++i < 2);",
    "nested": "for (int j = 0; j < 1; j++)"
    " for (int i = 0; i < 2; i++) if (t / 32 % 2 == i) v = __shfl_xor(v, 32);",
    "in a function": "auto f = [&](int i) { if (t / 32 % 2 == i) v = __shfl_xor(v, 32); };"
    " for (int i = 0; i < 2; i++) f(i);",
    "continue": "for (int i = 0; i < 2; i++) { if (t / 32 % 2 != i) continue; v = __shfl_xor(v, 32); }",
    "unrolled": "if (t / 32 % 2 == 0) v = __shfl_xor(v, 32); if (t / 32 % 2 == 1) v = __shfl_xor(v, 32);",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_lanes_in_different_iterations_are_not_active_together(loop: str) -> None:
    ran = run(f"float v = 1; {LOOPS[loop]} out[t] = v;")
    assert ran.report.inactive_reads == 128 and ran.values.isnan().all(), ran.report.inactive_reads


def test_lanes_meet_again_after_a_loop_of_different_lengths_and_within_one() -> None:
    after = run("float v = t; for (int i = 0; i < t % 5; i++) v += 0; v = __shfl_xor(v, 1); out[t] = v;")
    assert after.report.inactive_reads == 0
    assert (after.values == torch.arange(128).bitwise_xor(torch.tensor(1))).all()
    inner = (
        "for (int i = 0; i < 3; i++) { for (int j = 0; j < t % 3 + i; j++) v += 0; v = __shfl_xor(v, 1); }"
    )
    assert run(f"float v = t; {inner} out[t] = v;").report.inactive_reads == 0
    early = run(
        "float v = 1; for (int i = 0; i < 4; i++) { if (t % 2 && i == 2) break; v = __shfl_xor(v, 2); }"
        " out[t] = v;"
    )
    assert early.report.inactive_reads == 0, "partners leave together"


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
