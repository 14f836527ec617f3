"""What stands in a kernel's place: an object that is launched like the kernel and calls the twin.

vLLM's own seam (`vllm.triton_utils.dispatcher.KernelOverride`) drops the grid, and several kernels take
their number of requests or of padded rows from nowhere else; so the launcher here passes the grid on.

A twin returns `DECLINED`, before it has written anything, for a launch that it wasn't written for; that
launch then goes to the interpreted kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

DECLINED: Final = object()


class TwinKernel:
    """Launches as `kernel[grid](*args, **kwargs)`, like the kernel that it stands for."""

    def __init__(self, kernel: Any, twin: Callable[..., Any]) -> None:
        self.kernel = kernel
        self.twin = twin
        self.fn = kernel.fn
        self.arg_names = kernel.arg_names
        self.__name__ = str(kernel.fn.__name__)
        self.__module__ = str(kernel.fn.__module__)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """One launch. Launch options such as `num_warps` mean nothing to a twin, which ignores them."""
        if self.twin(grid, *args, **kwargs) is DECLINED:
            self.kernel[grid](*args, **kwargs)


def rebind(original: Any, replacement: Any) -> int:
    """Point every reference to a kernel or function at `replacement`; returns how many there were.

    References are those of vLLM's loaded modules: its own, and those that imported it by its name.
    """
    name = original.__name__
    # A worker has six thousand modules and rebinds two dozen names at its start: this loop is most of that.
    holders = [
        namespace
        for module_name, module in sys.modules.items()
        if module_name[:5] == "vllm." and (namespace := vars(module)).get(name) is original
    ]
    for namespace in holders:
        namespace[name] = replacement
    return len(holders)
