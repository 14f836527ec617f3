"""Lets vLLM's CPU build run its Triton kernels in Triton's interpreter.

vLLM's CPU build uses Triton only where `triton.backends` has a backend named `cpu`; the Triton wheel has
none, but its interpreter needs no backend, only a driver that answers a few questions. The driver here is
that. `TRITON_INTERPRET=1` must be in the environment before the process starts, because torch imports
Triton before any plugin runs; `dspark_deploy.launch.command` puts it there.

Three gaps of the interpreter (Triton 3.9) that vLLM's samplers meet are closed as well. Each is examined
by running the interpreter's own functions, so a Triton that has closed it reports `upstream`.

Not covered: Triton's compiled CPU backend (`triton-cpu`); where it is installed, nothing here applies.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, not_applicable, refused, upstream

_TRITON_UTILS = "vllm.triton_utils.importing"
_LIBDEVICE_UNARY = ("log1p", "expm1")


def patches() -> list[Patch]:
    """Patches that must be in place before `vllm.triton_utils` is imported."""
    return [
        Patch(
            "triton-interpreter-driver",
            "triton.backends.backends['cpu']",
            "vLLM's V2 runner and DSpark speculator run on a CPU",
            _examine_driver,
            _install_driver,
            required=True,
        ),
        Patch(
            "triton-interpreter-masks",
            "triton.runtime.interpreter.InterpreterBuilder.create_masked_load/store",
            "probabilistic drafting: the sampler's integer masks are accepted",
            _examine_masks,
            _install_masks,
        ),
        Patch(
            "triton-interpreter-libdevice",
            "triton.language.extra.libdevice." + "/".join(_LIBDEVICE_UNARY),
            "block rejection and probabilistic drafting: libdevice functions return values",
            _examine_libdevice,
            _install_libdevice,
        ),
    ]


def checks() -> list[Patch]:
    """Seen from the general hook, which vLLM does not silence: did the platform phase work?"""
    return [
        Patch(
            "vllm-triton-enabled",
            "vllm.triton_utils.HAS_TRITON",
            "the check that vLLM took up the interpreter",
            _examine_enabled,
            lambda: "HAS_TRITON is True",
            required=True,
        )
    ]


def _examine_driver() -> Verdict:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return refused("TRITON_INTERPRET=1 is not in this process's environment; start it with dspark-serve")
    loaded = sys.modules.get(_TRITON_UTILS)
    if loaded is not None and not loaded.HAS_TRITON:
        return refused(f"{_TRITON_UTILS} was imported before the plugin and has switched Triton off")
    import triton.backends

    if "cpu" in triton.backends.backends:
        return upstream("this Triton has a CPU backend of its own")
    return READY


def _install_driver() -> str:
    import torch
    import triton
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        """Answers what Triton asks of a driver when nothing is ever compiled."""

        def __init__(self) -> None:
            """No device library to load."""

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", "x86", 1)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Any:
            from triton.testing import do_bench

            return do_bench

    registered = triton.backends.backends
    # A Backend needs a compiler class too; it is never called, since the interpreter compiles nothing.
    compiler = next(iter(registered.values())).compiler
    registered["cpu"] = triton.backends.Backend(compiler=compiler, driver=InterpreterDriver)
    triton.runtime.driver.set_active(InterpreterDriver())
    return f"Triton {triton.__version__} interprets; backends: {', '.join(sorted(registered))}"


def _examine_masks() -> Verdict:
    from triton.runtime import interpreter

    builder = getattr(interpreter, "InterpreterBuilder", None)
    for method in ("create_masked_load", "create_masked_store"):
        if not callable(getattr(builder, method, None)):
            return refused(f"triton.runtime.interpreter.InterpreterBuilder has no {method}")
    return upstream("integer masks are accepted") if _integer_mask_works() else READY


def _integer_mask_works() -> bool:
    """Store through an int8 mask with the interpreter's own builder."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    cell = np.zeros(1, dtype=np.int32)
    pointer = interpreter.TensorHandle(
        np.array([cell.ctypes.data], dtype=np.uint64), tl.pointer_type(tl.int32)
    )
    value = interpreter.TensorHandle(np.ones(1, dtype=np.int32), tl.int32)
    mask = interpreter.TensorHandle(np.ones(1, dtype=np.int8), tl.int1)
    try:
        interpreter.InterpreterBuilder().create_masked_store(pointer, value, mask, None)
    except ValueError:  # "mask has unsupported dtype"
        return False
    return bool(cell[0] == 1)


def _install_masks() -> str:
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return load(self, ptrs, boolean(mask), *args, **kwargs)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return store(self, ptrs, value, boolean(mask), *args, **kwargs)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
    return "an int8 mask stores" if _integer_mask_works() else "installed, and an int8 mask still fails"


def _libdevice_handle(name: str) -> Any:
    """What libdevice returns inside the interpreter for the input 0.5; None from an empty stub."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    half = tl.tensor(interpreter.TensorHandle(np.array([0.5], dtype=np.float32), tl.float32), tl.float32)
    return getattr(libdevice, name)(half)


def _examine_libdevice() -> Verdict:
    from triton.language.extra import libdevice

    missing = [name for name in _LIBDEVICE_UNARY if not hasattr(libdevice, name)]
    if missing:
        return not_applicable(f"libdevice has no {', '.join(missing)}")
    if all(_libdevice_handle(name) is not None for name in _LIBDEVICE_UNARY):
        return upstream("libdevice functions return values")
    return READY


def _install_libdevice() -> str:
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    def unary(function: Any) -> Any:
        def call(x: Any, *_args: Any, **_kwargs: Any) -> Any:
            with np.errstate(all="ignore"):  # masked-off lanes hold anything, as on a device
                data = function(x.handle.data)
            return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)

        return call

    for name in _LIBDEVICE_UNARY:
        setattr(libdevice, name, unary(getattr(np, name)))
    return f"libdevice.log1p(0.5) = {float(_libdevice_handle('log1p').handle.data[0]):.6f}"


def _examine_enabled() -> Verdict:
    import vllm.triton_utils

    if vllm.triton_utils.HAS_TRITON:
        return READY
    return refused(
        "vLLM has switched Triton off in this process. Is VLLM_TARGET_DEVICE set (it skips platform "
        "plugins), or does VLLM_PLUGINS leave out dspark_deploy?"
    )
