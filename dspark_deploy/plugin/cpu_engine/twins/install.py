"""The patches that put the twins in their kernels' places, and the shortcuts around vLLM's functions."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from dspark_deploy.plugin.cpu_engine.twins import CATALOGUE, SHORTCUTS, WITH_THEIR_MODULES, Shortcut, Twin
from dspark_deploy.plugin.cpu_engine.twins.launcher import TwinKernel, rebind
from dspark_deploy.plugin.registry import READY, Patch, Verdict, refused, upstream
from dspark_deploy.plugin.when_loaded import when_loaded


def patches() -> list[Patch]:
    """One patch for each twin of the catalogue, and one for each shortcut."""
    twins = [_patch(twin) for twin in CATALOGUE]
    shortcuts = [
        Patch(
            f"shortcut:{shortcut.wrapper.split(':')[1]}",
            shortcut.function,
            "a greedy step without the small calls around its kernels",
            functools.partial(_examine_shortcut, shortcut),
            functools.partial(_install_shortcut, shortcut),
        )
        for shortcut in SHORTCUTS
    ]
    return twins + shortcuts


def watch(apply_late: Callable[[list[Patch]], None]) -> None:
    """Apply the twins that wait for their modules, as soon as each is loaded."""
    for twin in WITH_THEIR_MODULES:
        module = twin.kernel.rsplit(".", 2)[0]
        when_loaded(module, lambda _module, twin=twin: apply_late([_patch(twin)]))  # type: ignore[misc]


def _patch(twin: Twin) -> Patch:
    owner, name = twin.kernel.rsplit(".", 2)[1:]
    return Patch(
        f"twin:{owner if owner[:1].isupper() else name}",
        twin.kernel,
        "the kernel at native speed",
        functools.partial(_examine, twin),
        functools.partial(_install, twin),
    )


def _kernel(twin: Twin) -> Any:
    """vLLM's kernel, or None. Imports its module."""
    owner, name = _owner(twin.kernel)
    return getattr(owner, name, None)


def function(twin: Twin) -> Any:
    """Our function for `twin`."""
    return _ours(twin.twin)


def _ours(name: str) -> Any:
    module, attribute = name.split(":")
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
    return put(twin, TwinKernel(_kernel(twin), function(twin)))


def put(twin: Twin, replacement: Any) -> str:
    """Have vLLM launch `replacement` wherever it launches what is at the kernel's place; says where."""
    owner, name = _owner(twin.kernel)
    if inspect.isclass(owner):
        setattr(owner, name, replacement)
        return "its class's instances now launch it"
    return f"modules that now launch it: {rebind(getattr(owner, name), replacement)}"


def _owner(qualified: str) -> tuple[Any, str]:
    """The module or class that holds what is called `qualified`, and its name there. Imports the module."""
    path, name = qualified.rsplit(".", 1)
    module, _, attribute = path.rpartition(".")
    if attribute[:1].isupper():
        return getattr(importlib.import_module(module), attribute, None), name
    return importlib.import_module(path), name


def _examine_shortcut(shortcut: Shortcut) -> Verdict:
    from dspark_deploy.plugin.cpu_engine.twins.fingerprint import fingerprint

    try:
        owner, name = _owner(shortcut.function)
    except ModuleNotFoundError as error:
        return refused(f"there is no module {error.name}")
    original = getattr(owner, name, None)
    if original is None:
        return refused("vLLM has no such function")
    if hasattr(original, "__wrapped__"):
        return upstream("the function is wrapped already")
    found = fingerprint(original)
    if found != shortcut.fingerprint:
        return refused(
            f"its source has the fingerprint {found}, and the shortcut was written for {shortcut.fingerprint}"
        )
    return READY


def _install_shortcut(shortcut: Shortcut) -> str:
    owner, name = _owner(shortcut.function)
    original = getattr(owner, name)
    wrapper = _ours(shortcut.wrapper)(original)
    if inspect.isclass(owner):
        setattr(owner, name, wrapper)
        return "its class's method is wrapped"
    return f"modules that now call it: {rebind(original, wrapper)}"
