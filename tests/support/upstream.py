"""vLLM's mHC kernel modules out of a folder of its Python sources, without the rest of vLLM.

Importing vLLM itself asks for its compiled extensions and takes a minute. Here its packages are skeletons:
their `__init__` doesn't run, their modules are found in the folder, and only the platform is a stand-in, so
that the same sources can be loaded as a ROCm and as a CUDA build. One platform per process, since modules are
cached.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = (
    "vllm",
    "vllm.utils",
    "vllm.model_executor",
    "vllm.model_executor.kernels",
    "vllm.model_executor.kernels.mhc",
    "vllm.model_executor.warmup",
)
KERNELS = "vllm.model_executor.kernels.mhc.tilelang_kernels"
TORCH = "vllm.model_executor.kernels.mhc.torch"


class Platform:
    """The few questions that the kernel modules ask of `vllm.platforms.current_platform`."""

    def __init__(self, name: str, pdl: bool) -> None:
        self._name, self._pdl = name, pdl

    def is_cuda(self) -> bool:
        return self._name == "cuda"

    def is_rocm(self) -> bool:
        return self._name == "rocm"

    def is_cuda_alike(self) -> bool:
        return True

    def is_arch_support_pdl(self) -> bool:
        return self._pdl

    def has_device_capability(self, capability: Any) -> bool:
        return False


def install(sources: Path, platform: str, *, pdl: bool = False) -> None:
    """Make `import vllm...` in this process find the kernel modules of `sources`, as on `platform`."""
    assert "vllm" not in sys.modules, "vllm is imported already in this process"
    assert (sources / "vllm").is_dir(), f"{sources} holds no vllm"
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(sources.joinpath(*name.split(".")))]
        sys.modules[name] = package
    _stand_in("vllm.platforms", current_platform=Platform(platform, pdl))
    _stand_in("vllm.utils.import_utils", has_tilelang=lambda: True)


def _stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def kernels() -> ModuleType:
    """`tilelang_kernels` of the installed sources. Imports TileLang."""
    return importlib.import_module(KERNELS)


def references() -> ModuleType:
    """The torch references of the installed sources."""
    return importlib.import_module(TORCH)


def jit_function(kernel: Any) -> Any:
    """The `tilelang.jit` object behind a kernel, also where a ROCm build defers it to its first use."""
    return kernel._ensure_jit_kernel() if hasattr(kernel, "_ensure_jit_kernel") else kernel


LAYERS = "vllm.model_executor.layers.mhc"
LAYER_OPERATORS = ("MHCPreOp", "MHCPostOp", "MHCFusedPostPreOp", "MHCPreDelayedOp", "HCHeadOp")


def operators(dispatch_key: str = "CUDA") -> dict[str, Any]:
    """vLLM's mHC operators by class name, on its TileLang kernels, as CUDA dispatches them. After `install`.

    Their sources are vLLM's. Stand-ins: the class they inherit from, which here binds `forward_cuda` without
    asking a configuration; the registration with torch, under `dispatch_key`; no DeepGEMM and no AITER, so
    the projection is TileLang's, too.
    """
    from torch import nn
    from torch.library import Library, infer_schema

    registry = Library("vllm", "FRAGMENT")

    def register(op_name: str, op_func: Any, mutates_args: Any = (), fake_impl: Any = None) -> None:
        registry.define(op_name + infer_schema(op_func, mutates_args=mutates_args))
        registry.impl(op_name, op_func, dispatch_key=dispatch_key)

    class CustomOp(nn.Module):
        """Calls `forward_cuda`."""

        def __init__(self) -> None:
            super().__init__()
            self._forward_method = self.forward_cuda

        @classmethod
        def register(cls, _name: str) -> Any:
            return lambda operator: operator

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._forward_method(*args, **kwargs)

    layers = ModuleType("vllm.model_executor.layers")
    layers.__path__ = [str(Path(sys.modules["vllm"].__path__[0]) / "model_executor" / "layers")]
    sys.modules[layers.__name__] = layers
    _stand_in("vllm.utils.torch_utils", direct_register_custom_op=register, registry=registry)
    _stand_in("vllm.utils.deep_gemm", is_deep_gemm_supported=lambda: False, tf32_hc_prenorm_gemm=None)
    _stand_in("vllm._aiter_ops", is_aiter_found_and_supported=lambda: False)
    _stand_in("vllm.model_executor.custom_op", CustomOp=CustomOp)
    importlib.import_module("vllm.model_executor.kernels.mhc.tilelang")
    module = importlib.import_module(LAYERS)
    return {name: getattr(module, name)() for name in LAYER_OPERATORS if hasattr(module, name)}
