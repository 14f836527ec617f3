"""mHC kernels compiled to AMD machine code without a GPU. The code isn't run.

    pytest tests/simt/test_isa.py
    DSPARK_DEPLOY_CLANG=/opt/llvm/bin/clang++ pytest tests/simt/test_isa.py

vLLM's Triton kernels, which serve the head of DeepSeek-V4 on gfx942, by Triton's own AMD compiler, where
Triton is installed. TileLang's HIP sources for gfx942, vLLM's and ours, by a clang++ that knows gfx942 (17 or
later; on the path, or the one that the variable names), where there is one. `machine/` stands in for ROCm's
headers; TileLang's own are used as they are, but for matrix instructions and printing.

Not covered: ROCm's compiler and headers, linking, and TileLang's sources for gfx950, which clang 19 doesn't
know.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simt import cases, matrix
from tests.simt.generate import ROOT, Job, sources_of
from tests.support import sources

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import json, sys, types
from pathlib import Path
import triton
from triton import language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.support import upstream
upstream.install(Path(sys.argv[1]), "rocm")
for name, members in {
    "vllm.triton_utils": {"tl": language, "triton": triton},
    "vllm.utils.torch_utils": {"direct_register_custom_op": lambda **_: None},
}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(members)
import vllm.model_executor.kernels.mhc.triton as kernels

hidden = 4096
strides = dict(pre_stride_t=4, pre_stride_m=1, x_stride_t=4 * hidden, x_stride_m=hidden, x_stride_h=1)
head = dict(hidden_size=hidden, hc_mult=4, **strides, out_stride_t=hidden, out_stride_h=1, BLOCK_H=1024)
found = {}
for name, types_, constants in (
    ("_hc_head_reduce_store_kernel", dict(pre_ptr="*fp32", x_ptr="*bf16", out_ptr="*bf16"), head),
    (
        "_rmsnorm_nw_kernel",
        dict(x_ptr="*bf16", out_ptr="*fp32", stride_row="i32", D="i32", eps="fp32"),
        dict(RBLOCK=4 * hidden),
    ),
):
    signature = types_ | dict.fromkeys(constants, "constexpr")
    for arch in ("gfx942", "gfx950"):
        source = ASTSource(fn=getattr(kernels, name), signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("hip", arch, 64))
        found[f"{name} {arch}"] = made.asm["amdgcn"]
print(json.dumps(found))
"""


def test_triton_kernels_compile_for_amd(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton holds the AMD compiler; dspark-deploy[cpu] brings it")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(sources.vllm_sources("0.33.0"))],
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    for name, code in found.items():
        assert name.rpartition(" ")[2] in code and "s_endpgm" in code, (name, code[:500])
        assert ".amdhsa_wavefront_size32 1" not in code, f"{name} is for a wavefront of 32"


ARCH = "gfx942"
MACHINE = Path(__file__).parent / "machine"
FLAGS = ("-x", "hip", "--cuda-device-only", f"--offload-arch={ARCH}", "-nogpuinc", "-nogpulib")
TILELANG = [matrix.upstream(matrix.FIXED, kernel, ARCH, 1024) for kernel in cases.UPSTREAM]
TILELANG += [job for hidden in (4096, 7168) for job in matrix.ours(ARCH, hidden)]


@functools.cache
def clang() -> str | None:
    """A clang++ that makes code for gfx942; None where there is none."""
    named = os.environ.get("DSPARK_DEPLOY_CLANG")
    names = [named] if named else ["clang++", *(f"clang++-{version}" for version in range(22, 16, -1))]
    for name in names:
        found = shutil.which(name)
        if found and _made(found, ["-S", "-o", "-", "-"]).returncode == 0:
            return found
    return None


def _made(compiler: str, flags: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    command = [compiler, *FLAGS, "-std=c++17", "-O3", "-w", *flags]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)


def machine_code(job: Job) -> str:
    """The assembly of a kernel. Raises AssertionError with the compiler's words."""
    compiler = clang()
    if compiler is None:
        pytest.skip(f"no clang++ here makes code for {ARCH}: install clang-19, or set DSPARK_DEPLOY_CLANG")
    sources_of([job])
    templates = sources.tilelang_site() / "tilelang" / "src"
    source = job.stem().with_suffix(".hip")
    done = _made(compiler, ["-S", f"-I{MACHINE}", f"-I{templates}", str(source), "-o", "-"])
    assert done.returncode == 0, f"{job}: {done.stderr[:3000]}"
    return done.stdout


@pytest.mark.parametrize("job", TILELANG, ids=str)
def test_tilelang_kernels_compile_for_amd(job: Job) -> None:
    code = machine_code(job)
    told = dict(re.findall(r"^\s+\.(\w+):\s+(\d+)$", code, re.MULTILINE))
    assert told["wavefront_size"] == "64" and "s_endpgm" in code
    assert (
        told["vgpr_spill_count"] == told["sgpr_spill_count"] == told["private_segment_fixed_size"] == "0"
    ), told


def test_the_race_is_in_the_machine_code() -> None:
    """`pre_mix_shared` of vLLM 0.33.0's pre is written and read with no barrier between, at -O3 as well."""
    (job,) = (job for job in TILELANG if job.kernel == "pre")
    code = machine_code(job).splitlines()
    text = job.stem().with_suffix(".hip").read_text()
    (offset,) = re.findall(r"pre_mix_shared = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\)", text)
    at = [number for number, line in enumerate(code) if f"offset:{offset}" in line]
    written = [number for number in at if "ds_write" in code[number]]
    read = [number for number in at if "ds_read" in code[number]]
    assert written and read and written[0] < read[0]
    assert not [line for line in code[written[0] : read[0]] if "s_barrier" in line]
