"""vLLM 0.26 to 0.30's mHC pre kernels with a norm are wrong on ROCm: refused, or ours take their place.

Those kernels hand threads 0..31 of a block one job and threads 32..95 another, and reduce the norm over the
latter. TileLang's HIP reduction shuffles within wavefronts and ignores that the group starts at thread 32:
half of the sum is lost, and each layer's input comes out 1.414 times too large. vLLM 0.31 moved the group to
thread 0.

Each of the three mHC pre kernels is right, wrong or not understood. It is right only where its text was
understood as a whole and every reduction starts at a multiple of its own size (`thread_groups`); where the
text isn't understood, TileLang's generated source decides (`lowered`). What follows is the profile's:

    mhc.gate      wrong                               not understood
    refuse        the process stops                   stays, and the state is `refused`
    warn, off     ours take its place                 stays, and the state is `refused`

A kernel that isn't understood is no reason to stop: the numerics gate measures it on the device before the
engine is ready, as it measures a replacement, unless `mhc.gate` is off. With `mhc.provider: aiter` or
`torch`, or where vLLM has TileLang's mHC off, nothing calls these kernels. Emulated only: docs/wave64.md.

Not covered: gfx942, where vLLM doesn't use TileLang for mHC; CUDA, where the kernels are right and stay.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, not_applicable, refused, upstream
from dspark_deploy.plugin.wave64 import thread_groups
from dspark_deploy.plugin.wave64.thread_groups import NotUnderstoodError
from dspark_deploy.plugin.wave64.two_launches import TwoLaunches, unmatched

KERNELS = "vllm.model_executor.kernels.mhc.tilelang_kernels"
LAYERS = "vllm.model_executor.layers.mhc"
WITH_NORM = "mhc_pre_big_fuse_with_norm_tilelang"
BROADCAST = "mhc_pre_big_fuse_broadcast_with_norm_tilelang"
PLAIN = "mhc_pre_big_fuse_tilelang"
EXAMINED = (WITH_NORM, BROADCAST, PLAIN)
OTHER_WAY = "take vLLM 0.31 or later, or set mhc.provider: aiter or torch"
WAY_ON = (
    f"{OTHER_WAY}; or set mhc.gate: warn, with which ours takes the place of a kernel known to be wrong: "
    f"dspark-serve --selftest measures it on this GPU beforehand"
)

MEASURED = "It stays: the numerics gate measures it on this device before the engine is ready"
UNCHECKED = f"It stays, and mhc.gate is off, so nothing checks it: set mhc.gate: refuse, or {OTHER_WAY}"


class State(StrEnum):
    """What is known of one kernel on a wavefront of 64."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_UNDERSTOOD = "not understood"


@dataclass(frozen=True, slots=True)
class Finding:
    """One kernel's state, and by what it is known."""

    name: str
    state: State
    reason: str
    function: Callable[..., Any] | None = None

    @property
    def replaceable(self) -> bool:
        """Whether it is wrong, and ours takes the same arguments."""
        return self.state is State.WRONG and self.function is not None and not unmatched(self.function)

    def __str__(self) -> str:
        obstacle = unmatched(self.function) if self.state is State.WRONG and self.function else ""
        no_replacement = f", and takes other arguments than its replacement: {obstacle}" if obstacle else ""
        return f"{self.name} is {self.state}: {self.reason}{no_replacement}"


def patch(module: ModuleType, policy: str, provider: str) -> Patch:
    """The patch of vLLM's TileLang mHC kernels, once their module is loaded on ROCm.

    `policy` is the profile's `mhc.gate`, `provider` its `mhc.provider`.
    """
    findings = functools.cache(functools.partial(examined, module))
    return Patch(
        "mhc-wave64",
        f"{KERNELS}.{PLAIN.removesuffix('_tilelang')}*",
        "mHC pre with a norm isn't 1.414 times too large on AMD (emulated only)",
        functools.partial(_examine, findings, policy, provider),
        functools.partial(_install, module, findings),
        required=policy == "refuse",
    )


def python_function(kernel: Any) -> Callable[..., Any] | None:
    """The Python function behind a kernel object, which holds it one or two objects deep.

    vLLM defers TileLang's decoration on ROCm (`_kernel_function`), or wraps it in a closure (`__wrapped__`);
    TileLang's own objects hold it as `func.orig_func`.
    """
    if inspect.isfunction(kernel) and not hasattr(kernel, "__wrapped__"):
        return kernel
    for name in ("_kernel_function", "__wrapped__", "orig_func", "func"):
        inner = getattr(kernel, "__dict__", {}).get(name)
        if inner is not None:
            return python_function(inner)
    return None


def examined(module: ModuleType) -> list[Finding]:
    """A finding for each mHC pre kernel that the module has."""
    with _without_collections():
        return [_finding(name, vars(module)[name]) for name in EXAMINED if name in vars(module)]


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Reading a text may set off a collection of the whole heap, which costs several times the reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _finding(name: str, kernel: Any) -> Finding:
    function = python_function(kernel)
    if function is None:
        return Finding(name, State.NOT_UNDERSTOOD, "it is no kernel whose text can be read")
    try:
        wrong = [
            threads for threads in thread_groups.reductions(function) if not thread_groups.aligned(threads)
        ]
    except NotUnderstoodError as by_text:
        return _by_generated_source(name, kernel, function, str(by_text))
    if wrong:
        shown = ", ".join(f"{threads.start} to {threads.stop - 1}" for threads in wrong)
        return Finding(
            name, State.WRONG, f"it reduces over threads {shown}, which don't start at a wavefront", function
        )
    return Finding(name, State.RIGHT, "each of its reductions starts at a multiple of its own size")


def _by_generated_source(name: str, kernel: Any, function: Callable[..., Any], by_text: str) -> Finding:
    """What TileLang generates, for a kernel whose text holds `by_text`, which isn't understood."""
    from dspark_deploy.plugin.wave64 import lowered

    try:
        wrong = lowered.misaligned(lowered.source(kernel, function))
    except NotUnderstoodError as by_source:
        return Finding(name, State.NOT_UNDERSTOOD, f"its text has {by_text}, and {by_source}")
    if wrong:
        return Finding(
            name,
            State.WRONG,
            f"TileLang generates {wrong[0]} of it, which starts within a wavefront",
            function,
        )
    return Finding(name, State.RIGHT, "each reduction that TileLang generates of it starts at its own size")


def _unrouted(provider: str) -> str:
    """Why nothing calls these kernels, or nothing."""
    if provider in ("aiter", "torch"):
        return f"mhc.provider is {provider}: nothing calls TileLang's kernels"
    layers = sys.modules.get(LAYERS)
    if getattr(layers, "HAS_TILELANG_MHC", None) is False:
        return f"{LAYERS}.HAS_TILELANG_MHC is False: vLLM doesn't use TileLang's kernels here"
    return ""


def _examine(findings: Callable[[], list[Finding]], policy: str, provider: str) -> Verdict:
    unrouted = _unrouted(provider)
    if unrouted:
        return not_applicable(unrouted)
    found = findings()
    if not found:
        return not_applicable(f"this vLLM has none of {', '.join(EXAMINED)}")
    bad = [each for each in found if each.state is not State.RIGHT]
    if not bad:
        return upstream("; ".join(dict.fromkeys(each.reason for each in found)))
    if policy != "refuse" and any(each.replaceable for each in bad):
        return READY
    shown = "; ".join(map(str, bad))
    if any(each.state is State.WRONG for each in bad):
        return refused(f"{shown}. What to do: {WAY_ON if policy == 'refuse' else OTHER_WAY}")
    return refused(f"{shown}. {UNCHECKED if policy == 'off' else MEASURED}", fatal=False)


def _install(module: Any, findings: Callable[[], list[Finding]]) -> str:
    replaced, kept = [], []
    for each in findings():
        if each.replaceable and each.function is not None:
            setattr(module, each.name, TwoLaunches(each.name, each.function))
            replaced.append(each.name)
        elif each.state is not State.RIGHT:
            kept.append(str(each))
    stays = "".join(f"; stays: {each}" for each in kept)
    return f"replaced by two launches: {', '.join(replaced)}; emulated only, never run on an AMD GPU{stays}"
