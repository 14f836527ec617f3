"""The patches that put the twins in their kernels' places, and the shortcuts around vLLM's functions."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

from dspark_deploy.plugin.cpu_engine.twins import CATALOGUE, SHORTCUTS, Shortcut, Twin
from dspark_deploy.plugin.cpu_engine.twins.launcher import TwinKernel, rebind
from dspark_deploy.plugin.registry import READY, Patch, Verdict, refused, upstream
from dspark_deploy.plugin.when_loaded import when_loaded


def loaded() -> list[Patch]:
    """The patches of modules that are loaded, and of those that this vLLM lacks, to be refused by name."""
    return [patch for module, patches in _by_module().items() if not _is_awaited(module) for patch in patches]


def watch(apply_late: Callable[[list[Patch]], None]) -> None:
    """Apply the others as soon as their module is loaded: a process that never loads it pays nothing."""
    for module, patches in _by_module().items():
        if _is_awaited(module):
            when_loaded(module, lambda _module, patches=patches: apply_late(patches))  # type: ignore[misc]


def _by_module() -> dict[str, list[Patch]]:
    found: dict[str, list[Patch]] = {}
    for twin in CATALOGUE:
        found.setdefault(_place(twin.kernel)[0], []).append(_patch(twin))
    for shortcut in SHORTCUTS:
        patch = Patch(
            f"shortcut:{shortcut.wrapper.split(':')[1]}",
            shortcut.function,
            "a greedy step without the small calls around its kernels",
            functools.partial(_examine_shortcut, shortcut),
            functools.partial(_install_shortcut, shortcut),
        )
        found.setdefault(_place(shortcut.function)[0], []).append(patch)
    return found


def _is_awaited(module: str) -> bool:
    """Whether this vLLM has the module and this process has not loaded it yet."""
    if module in sys.modules:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


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


def _place(qualified: str) -> tuple[str, str, str]:
    """Module, class or nothing, and name of what is called `qualified`."""
    path, name = qualified.rsplit(".", 1)
    module, _, attribute = path.rpartition(".")
    return (module, attribute, name) if attribute[:1].isupper() else (path, "", name)


def _owner(qualified: str) -> tuple[Any, str]:
    """The module or class that holds what is called `qualified`, and its name there. Imports the module."""
    module, attribute, name = _place(qualified)
    owner = importlib.import_module(module)
    return (getattr(owner, attribute, None) if attribute else owner), name


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
