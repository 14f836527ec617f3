"""vLLM's Triton kernels for mHC, compiled to AMD machine code without a GPU, where Triton is installed.

These serve the head of DeepSeek-V4 on gfx942. Triton carries its own AMD compiler, so a kernel that this
Triton can't compile is seen here and not at a server's start. The code isn't run. Not covered: TileLang's HIP
sources, which need ROCm's own compiler and headers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simt.generate import ROOT
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
