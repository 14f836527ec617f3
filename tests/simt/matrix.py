"""Which kernels are emulated, of which vLLM, for which architecture, at which size."""

from __future__ import annotations

import os
from typing import Any

from dspark_deploy.kernels import mhc_pre
from dspark_deploy.kernels.mhc_pre import HC
from tests.simt import cases
from tests.simt.generate import WAVE, Job

FULL = os.environ.get("DSPARK_SIMT_FULL") == "1"
HIDDEN = (1024, 4096, 5120, 7168)
UPSTREAM_HIDDEN = HIDDEN if FULL else (1024,)
TOKENS = (1, 8)
FIXED, WRONG = "0.33.0", "0.27.1"
PRE = ("pre", "pre_with_norm", "pre_broadcast_with_norm")
SPLITS = (1, 8)

# What 0.30 and later added. A split mode needs the carried pre-mix, as upstream asserts.
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "pre": (
        {"n_splits": 8},
        {"save_pre_mix": True, "rms_numel": 1024},
        {"save_pre_mix": True, "use_pre_mix_in": True, "write_aux": True},
    ),
    "pre_with_norm": (
        {"n_splits": 8},
        {"save_pre_mix": True, "use_pre_mix_in": True, "write_aux": True},
        {"save_pre_mix": True, "use_pre_mix_in": True, "split_mode": "stats"},
        {"save_pre_mix": True, "use_pre_mix_in": True, "split_mode": "input"},
    ),
    "fused_post_pre": ({"tile_n": 6},),
    "prenorm_gemm": ({"n_thr": 1024, "tile_n": 4}, {"n_splits": 2}),
}


def upstream(origin: str, kernel: str, arch: str, hidden: int, **options: Any) -> Job:
    """One of vLLM's kernels."""
    return Job(origin, kernel, arch, hidden, cases.compile_time(kernel, hidden, options))


def ours(arch: str, hidden: int) -> list[Job]:
    """Our kernels of one size: both splits of the projection, with and without norm, and each option."""
    jobs = [
        Job("ours", "mix", arch, hidden, mhc_pre.mix_parameters(n, HC * hidden, cases.CONSTANTS))
        for n in SPLITS
    ]
    eps = cases.CONSTANTS.norm_eps
    for norm_eps in (eps, None):
        block = mhc_pre.plan(hidden, norm_eps is not None)
        plain = mhc_pre.collapse_parameters(hidden, norm_eps, block)
        jobs.append(Job("ours", "collapse", arch, hidden, plain))
        jobs.append(Job("ours", "collapse", arch, hidden, plain | {"write_aux": True}))
        jobs.append(Job("ours", "collapse", arch, hidden, plain | {"stream_zero": True}))
    return jobs


# Right on the architecture that vLLM uses them on.
RIGHT = [upstream(FIXED, kernel, "gfx950", h) for kernel in cases.UPSTREAM for h in UPSTREAM_HIDDEN]
RIGHT += [
    upstream(FIXED, kernel, "gfx950", 1024, **options)
    for kernel, found in OPTIONS.items()
    for options in found
]
if FULL:
    RIGHT += [
        upstream(FIXED, kernel, arch, h)
        for arch in ("gfx942", "gfx1100")
        for kernel in cases.UPSTREAM
        for h in UPSTREAM_HIDDEN
        if (kernel, arch) != ("pre", "gfx942")
    ]
OURS = [job for arch in WAVE for hidden in HIDDEN for job in ours(arch, hidden)]

# Known faults. 0.27.1 stands for 0.26 to 0.30, whose text is the same where it matters.
HALF_NORM = [upstream(WRONG, kernel, "gfx950", h) for kernel in PRE[1:] for h in UPSTREAM_HIDDEN]
RACE = [upstream(origin, "pre", "gfx942", 1024) for origin in (WRONG, FIXED)]
NARROW = upstream(WRONG, "pre_with_norm", "gfx1100", 1024)
SYNCHRONOUS = [upstream(FIXED, kernel, "gfx942", 1024) for kernel in PRE[1:]]
FAULTY = [*HALF_NORM, *RACE, NARROW, *SYNCHRONOUS]
