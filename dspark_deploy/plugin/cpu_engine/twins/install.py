"""The patches that put the twins in their kernels' places."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from dspark_deploy.plugin.cpu_engine.twins import CATALOGUE, Twin
from dspark_deploy.plugin.cpu_engine.twins.launcher import TwinKernel, rebind
from dspark_deploy.plugin.registry import READY, Patch, Verdict, refused, upstream


def patches() -> list[Patch]:
    """One patch for each twin of the catalogue."""
    return [
        Patch(
            f"twin:{twin.kernel.rsplit('.', 1)[1]}",
            twin.kernel,
            "the kernel at native speed",
            functools.partial(_examine, twin),
            functools.partial(_install, twin),
        )
        for twin in CATALOGUE
    ]


def _kernel(twin: Twin) -> Any:
    """vLLM's kernel, or None. Imports its module."""
    module, attribute = twin.kernel.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute, None)


def function(twin: Twin) -> Any:
    """Our function for `twin`."""
    module, attribute = twin.twin.split(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), attribute)


def _examine(twin: Twin) -> Verdict:
    from dspark_deploy.plugin.cpu_engine.twins.fingerprint import fingerprint

    try:
        kernel = _kernel(twin)
    except ModuleNotFoundError as error:
        return refused(f"there is no module {error.name}")
    if kernel is None:
        return refused("the module has no such kernel")
    if isinstance(kernel, TwinKernel):
        return upstream("the twin is installed already")
    if not hasattr(kernel, "fn"):
        return refused(f"a {type(kernel).__name__} stands in its place, not a Triton kernel")
    expected = list(inspect.signature(function(twin)).parameters)[1:-1]
    if kernel.arg_names != expected:
        changed = sorted(set(kernel.arg_names) ^ set(expected))
        return refused(f"its parameters differ in {', '.join(changed) or 'their order'}")
    found = fingerprint(kernel)
    if found != twin.fingerprint:
        return refused(
            f"its source has the fingerprint {found}, and the twin was written for {twin.fingerprint}"
        )
    return READY


def _install(twin: Twin) -> str:
    kernel = _kernel(twin)
    count = rebind(kernel, TwinKernel(kernel, function(twin)))
    return f"modules that now launch it: {count}"
