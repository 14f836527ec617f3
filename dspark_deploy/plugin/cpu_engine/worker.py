"""What is patched in a worker only, at the moment when vLLM asks its platform to override kernels.

vLLM makes that call (`register_triton_kernel_overrides`) once per worker, after the general plugins and
before any model code. Patches that touch the runner's modules wait for it, so that the API server never
imports those.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, refused

_WORKER_CALL = "register_triton_kernel_overrides"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"


def hook(cpu_twins: bool, apply_late: Callable[[list[Patch]], None]) -> Patch:
    """The patch of the general phase, which brings the others with it in each worker, by `apply_late`."""
    return Patch(
        "worker-phase",
        f"vllm.platforms.cpu.CpuPlatform.{_WORKER_CALL}",
        "workers get the patches of vLLM's runner",
        _examine_hook,
        functools.partial(_install_hook, cpu_twins, apply_late),
    )


def _top_k_top_p() -> Patch:
    return Patch(
        "top-k-top-p",
        f"{_SAMPLER}.apply_top_k_top_p_triton",
        "requests with top_k or top_p are answered: the interpreter fails in their kernel",
        _examine_top_k_top_p,
        _install_top_k_top_p,
    )


def _examine_hook() -> Verdict:
    from vllm.platforms.cpu import CpuPlatform

    if not callable(getattr(CpuPlatform, _WORKER_CALL, None)):
        return refused(f"CpuPlatform has no {_WORKER_CALL}, by which a worker asks for kernel overrides")
    return READY


def _install_hook(cpu_twins: bool, apply_late: Callable[[list[Patch]], None]) -> str:
    from vllm.platforms.cpu import CpuPlatform

    original = getattr(CpuPlatform, _WORKER_CALL).__func__

    @functools.wraps(original)
    def register(cls: Any) -> None:
        original(cls)
        # vLLM's CPU stand-ins for CUDA calls must be in place before a runner module is imported.
        importlib.import_module("vllm.v1.worker.cpu.shm")
        if not cpu_twins:
            apply_late([_top_k_top_p()])
            return
        # The worker imports it next in any case; loaded here first, its kernels are there to be replaced.
        importlib.import_module(_RUNNER)
        from dspark_deploy.plugin.cpu_engine.twins import install

        apply_late([_top_k_top_p(), *install.loaded()])
        install.watch(apply_late)

    setattr(CpuPlatform, _WORKER_CALL, classmethod(register))
    return "a worker will be patched when it asks for overrides"


def _examine_top_k_top_p() -> Verdict:
    module = importlib.import_module(_SAMPLER)
    for name in ("apply_top_k_top_p_triton", "apply_top_k_top_p_pytorch"):
        if not callable(getattr(module, name, None)):
            return refused(f"{_SAMPLER} has no {name}")
    return READY


def _install_top_k_top_p() -> str:
    module: Any = importlib.import_module(_SAMPLER)

    # What vLLM's CPU build calls itself where it has no Triton.
    module.apply_top_k_top_p_triton = functools.partial(module.apply_top_k_top_p_pytorch, allow_cpu_sync=True)
    return "top-k and top-p go to vLLM's torch implementation"
