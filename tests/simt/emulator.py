"""Compiles a HIP source for the CPU and runs it, one lane at a time, as a device with wavefronts would.

TileLang's own device headers are used as they are, out of its wheel; `device/` holds what they expect from
ROCm, and the emulator behind that. How it works, and what it can't tell, is in `docs/wave64.md`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.simt.cases import Case
from tests.simt.generate import SHARED_BYTES, Job
from tests.support import sources

DEVICE = Path(__file__).parent / "device"
COMMON = ("g++", "-std=c++17", "-w", "-fPIC", "-fno-omit-frame-pointer", "-ffp-contract=off", f"-I{DEVICE}")
# Each access to memory, each basic block, and each copy of variable length comes to the emulator.
HOOKS = ("-fsanitize=thread", "-fsanitize-coverage=trace-pc")
WRAPPED = tuple(f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset"))
POLICIES = {"zero": 0, "stale": 1, "own": 2, "poison": 3}
ORDERS = {"forward": 0, "backward": 1, "random": 2}


@dataclass(frozen=True)
class Schedule:
    """One way to run a launch that the hardware is free to choose, or that stands for what isn't known.

    `inactive` is what a shuffle reads from a lane that isn't active: `poison` needs no assumption, `zero`,
    `stale` (its last value) and `own` are guesses. `fill` is the byte that shared memory starts with; 255
    makes NaN.
    """

    waves: str = "forward"
    reverse_lanes: bool = False
    inactive: str = "poison"
    fill: int = 255
    seed: int = 0


# Every order a test runs through: waves first to last, last to first, at random, and lanes reversed.
SCHEDULES = (
    Schedule(),
    Schedule(waves="backward"),
    Schedule(waves="backward", fill=0),
    Schedule(reverse_lanes=True),
    Schedule(waves="random", seed=1),
    Schedule(waves="random", seed=2, reverse_lanes=True, fill=0),
)


class Report(ctypes.Structure):
    """What a run met. `races` are accesses of two waves to one byte of shared memory or of an output in one
    barrier interval, one of them a write, and not both atomic; two writes of the same value are counted as
    `same_value` instead. `wave_synchronous` are reads ordered by the wave's lockstep alone. `out_of_bounds`
    are accesses outside the launch's shared memory and tensors, and writes to inputs. `blocks` are basic
    blocks entered, which stand for work."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("shuffles", "inactive_reads", "divergent_barriers", "races", "wave_synchronous"),
            *("out_of_bounds", "uninitialised", "switches", "same_value", "blocks"),
            *("race_offset", "race_first", "race_second"),
        )
    ]

    def faults(self) -> dict[str, int]:
        """The counts that a right kernel has none of."""
        names = ("inactive_reads", "races", "out_of_bounds")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class Kernel:
    """A compiled kernel. `drop` removes the barriers of those numbers, from 0 in the order of the text."""

    def __init__(self, job: Job, drop: tuple[int, ...] = ()) -> None:
        stem = job.stem()
        facts = json.loads(stem.with_suffix(".json").read_text())
        self.job, self.threads, self.shared_bytes = job, facts["threads"], facts["shared_bytes"]
        limit = SHARED_BYTES[job.arch]
        assert self.shared_bytes <= limit, (
            f"{job}: {self.shared_bytes} bytes of shared memory, {limit} there are"
        )
        text = without_barriers(stem.with_suffix(".hip").read_text(), drop)
        self.parameters = parameters(text)
        self._library = ctypes.CDLL(str(compiled(emulated(text, self.parameters))))

    def run(self, case: Case, wave: int, schedule: Schedule) -> Report:
        """Launch on the tensors of `case`, whose outputs are written."""
        tensors = case.inputs | {name: output.bits for name, output in case.outputs.items()}
        values: list[ctypes._SimpleCData[int]] = []
        count = len(self.parameters)
        sizes, outputs, writes = (
            (ctypes.c_int64 * count)(),
            (ctypes.c_int * count)(),
            (ctypes.c_int64 * count)(),
        )
        for i, (kind, name) in enumerate(self.parameters):
            if kind.endswith("*"):
                values.append(ctypes.c_void_p(tensors[name].data_ptr()))
                sizes[i] = tensors[name].numel() * tensors[name].element_size()
                outputs[i] = name in case.outputs
            else:
                values.append(ctypes.c_int(case.scalars[name]))
        arguments = (ctypes.c_void_p * count)(*(ctypes.addressof(value) for value in values))
        report = Report()
        self._library.simt_run(
            self._library.simt_entry,
            arguments,
            count,
            sizes,
            outputs,
            (ctypes.c_uint * 3)(*case.grid),
            (ctypes.c_uint * 3)(self.threads, 1, 1),
            ctypes.c_uint(self.shared_bytes),
            wave,
            POLICIES[schedule.inactive],
            ORDERS[schedule.waves],
            int(schedule.reverse_lanes),
            ctypes.c_uint32(schedule.seed),
            schedule.fill,
            ctypes.byref(report),
            writes,
        )
        for (_, name), written in zip(self.parameters, writes, strict=True):
            if name in case.outputs:
                case.outputs[name].writes += written
        return report


def barriers(job: Job) -> int:
    """How many barriers the text of a kernel has, those inside TileLang's reductions not counted."""
    return job.stem().with_suffix(".hip").read_text().count("__syncthreads();")


def without_barriers(text: str, drop: tuple[int, ...]) -> str:
    """The text without the barriers of those numbers."""
    pieces = text.split("__syncthreads();")
    assert all(0 <= number < len(pieces) - 1 for number in drop), f"barriers {drop} of {len(pieces) - 1}"
    joined = pieces[0]
    for number, piece in enumerate(pieces[1:]):
        joined += ("" if number in drop else "__syncthreads();") + piece
    return joined


def parameters(text: str) -> list[tuple[str, str]]:
    """Type and name of each parameter, in order."""
    found = re.findall(r"__global__ void[^(]*\([^)]*\) \w+\(([^)]*)\)", text)
    assert len(found) == 1, f"{len(found)} kernels in one source"
    cleaned = found[0].replace("__restrict__", "").replace("const ", "")
    pairs = [parameter.rsplit(" ", 1) for parameter in cleaned.split(", ")]
    return [(kind.strip(), name.strip()) for kind, name in pairs]


def emulated(text: str, signature: list[tuple[str, str]]) -> str:
    """The source for g++: shared memory is the emulator's, and an entry unpacks the arguments."""
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)simt::lds;", text
    )
    raw = re.search(r"__shared__|\basm\b|__builtin_amdgcn_(?!wavefrontsize)|\bmfma", text)
    assert not raw, f"{raw and raw.group()} isn't emulated"
    name = re.findall(r"__global__ void[^(]*\([^)]*\) (\w+)\(", text)[0]
    arguments = ", ".join(f"*({kind}*)arguments[{i}]" for i, (kind, _) in enumerate(signature))
    # What the entry itself reads is no access of the kernel's.
    unseen = '__attribute__((no_sanitize("thread")))'
    return f'{text}\nextern "C" {unseen} void simt_entry(void **arguments) {{ {name}({arguments}); }}\n'


def compiled(text: str) -> Path:
    """The shared library of a source, built once per content."""
    runtime = (DEVICE / "simt.cpp").read_text() + "".join(
        path.read_text() for path in sorted(DEVICE.rglob("*")) if path.suffix in (".h", ".hpp")
    )
    digest = hashlib.sha256((text + runtime).encode()).hexdigest()[:16]
    folder = sources.cache_folder() / "simt" / "built"
    library = folder / f"{digest}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    kernel, kernel_object = folder / f"{digest}.cpp", folder / f"{digest}.o"
    kernel.write_text(text)
    templates = sources.tilelang_site() / "tilelang" / "src"
    runtime_object = folder / f"simt-{hashlib.sha256(runtime.encode()).hexdigest()[:16]}.o"
    if not runtime_object.exists():
        _run(
            [
                *COMMON,
                "-O2",
                "-fno-optimize-sibling-calls",
                "-c",
                str(DEVICE / "simt.cpp"),
                "-o",
                str(runtime_object),
            ]
        )
    # -O0 keeps the program in the order of its text; the sanitizer's hooks bring every access to the
    # emulator.
    _run([*COMMON, "-O0", *HOOKS, f"-I{templates}", "-c", str(kernel), "-o", str(kernel_object)])
    partial = library.with_suffix(".partial")
    _run(["g++", "-shared", *WRAPPED, "-o", str(partial), str(kernel_object), str(runtime_object)])
    partial.replace(library)
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
