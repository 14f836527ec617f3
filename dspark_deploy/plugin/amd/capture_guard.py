"""Hooks on TileLang, Triton and AITER, by which every compile reaches `compiles`.

vLLM's own monitor is armed after capture, leaves TileLang out on ROCm and does not know AITER's builds. Each
hook here sits where its library compiles, below the lookup that finds a kernel that is there already:

    TileLang   JITImpl.compile, and JITKernel.__init__, which tells a compile from a load from disk
    Triton     knobs.runtime.jit_cache_hook before a compile, knobs.compilation.listener after it
    AITER      aiter.jit.core.build_module, which builds one C++ extension

Not covered: compiles of torch.compile's own backend, and of libraries that are none of the three.
"""

from __future__ import annotations

import functools
import inspect
import time
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.amd.compiles import Compile, Compiles
from dspark_deploy.plugin.registry import READY, Patch, Verdict, not_applicable, refused

TILELANG, TRITON, AITER = "tilelang.jit", "triton.knobs", "aiter.jit.core"
WHY = "compiles are counted by phase, and refused in capture and after readiness where jit.guard says so"


def patch(module: ModuleType, compiles: Compiles) -> Patch:
    """The patch of one of the three modules, once it is loaded."""
    examine, install, target = {
        TILELANG: (_examine_tilelang, _install_tilelang, "tilelang.jit.JITImpl.compile"),
        TRITON: (_examine_triton, _install_triton, "triton.knobs.runtime.jit_cache_hook"),
        AITER: (_examine_aiter, _install_aiter, "aiter.jit.core.build_module"),
    }[module.__name__]

    def examine_if_on() -> Verdict:
        return not_applicable("jit.guard is off") if compiles.guard == "off" else examine(module)

    name = f"capture-guard:{module.__name__.partition('.')[0]}"
    return Patch(name, target, WHY, examine_if_on, functools.partial(install, module, compiles))


def token_count(values: Any) -> int:
    """Tokens of a call, from its tensors: dimension 0 of the first bf16 activation, else 0.

    Weights of a norm have one dimension and are passed over.
    """
    for value in values:
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape) >= 2 and str(getattr(value, "dtype", "")).endswith("bfloat16"):
            return int(shape[0])
    return 0


def kernel_name(jit: Any) -> str:
    """The name of the function that a TileLang JITImpl decorates."""
    return str(getattr(getattr(jit.func, "orig_func", None), "__name__", "unnamed"))


def tilelang_key(jit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key under which `jit.__call__` looks a kernel up for these arguments."""
    if jit.mode == "auto":
        jit.mode = jit._infer_jit_mode(*args, **kwargs)
        jit.func.set_mode(jit.mode)
    key, _ = jit.func.parse_args(*args, **kwargs)
    return key


def _examine_tilelang(module: ModuleType) -> Verdict:
    implementation = getattr(module, "JITImpl", None)
    kernel = getattr(module, "JITKernel", None)
    for name, found in (("JITImpl.compile", getattr(implementation, "compile", None)), ("JITKernel", kernel)):
        if not callable(found):
            return refused(f"tilelang.jit has no {name}")
    if "from_database" not in inspect.signature(kernel.__init__).parameters:  # type: ignore[misc]
        return refused("JITKernel.__init__ has no from_database, which tells a compile from a load")
    if "_infer_jit_mode" not in vars(implementation):
        return refused("JITImpl has no _infer_jit_mode, by which a call becomes a key")
    return READY


def _install_tilelang(module: Any, compiles: Compiles) -> str:
    original, build = module.JITImpl.compile, module.JITKernel.__init__
    position = list(inspect.signature(build).parameters).index("from_database") - 1

    @functools.wraps(original)
    def compile_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = str(tilelang_key(self, args, kwargs))
        with compiles.watch("tilelang", kernel_name(self), key, token_count((*args, *kwargs.values()))):
            return original(self, *args, **kwargs)

    @functools.wraps(build)
    def build_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        from_disk = args[position] if len(args) > position else kwargs.get("from_database", False)
        current = compiles.current
        if current is not None:
            if not from_disk:
                current.source = "compiled"
            return build(self, *args, **kwargs)
        if from_disk:
            return build(self, *args, **kwargs)
        # A compile that went past JITImpl.compile, as par_compile does: only the function's name is known.
        function = args[0] if args else kwargs.get("func")
        name = str(getattr(function, "attrs", {}).get("global_symbol", "unnamed"))
        with compiles.watch("tilelang", name, "unknown", 0) as compile_:
            compile_.source = "compiled"
            return build(self, *args, **kwargs)

    module.JITImpl.compile = compile_watched
    module.JITKernel.__init__ = build_watched
    return "JITImpl.compile and JITKernel.__init__ are watched"


def _examine_triton(module: ModuleType) -> Verdict:
    if not hasattr(getattr(module, "runtime", None), "jit_cache_hook"):
        return refused("triton.knobs.runtime has no jit_cache_hook, which is called before a compile")
    if not hasattr(getattr(module, "compilation", None), "listener"):
        return refused("triton.knobs.compilation has no listener, which tells a compile from a load")
    return READY


def _install_triton(module: Any, compiles: Compiles) -> str:
    before, after = module.runtime.jit_cache_hook, module.compilation.listener
    # Triton compiles in the thread that asked, and calls the hook, then the listener.
    pending: list[tuple[Compile, float]] = []

    def about_to_compile(**kwargs: Any) -> Any:
        name = str(getattr(kwargs.get("fn"), "name", "unnamed"))
        details = kwargs.get("compile") or {}
        key = str(details.get("key", kwargs.get("key", "unknown")))
        compile_ = Compile("triton", name, key, _tokens_on_stack(), compiles.phase)
        compiles.allow(compile_)
        pending[:] = [(compile_, time.perf_counter())]
        return before(**kwargs) if before is not None else None

    def compiled(**kwargs: Any) -> None:
        if pending:
            compile_, started = pending.pop()
            compile_.seconds = round(time.perf_counter() - started, 3)
            compile_.source = "disk" if kwargs.get("cache_hit") else "compiled"
            compiles.add(compile_)
        if after is not None:
            after(**kwargs)

    module.runtime.jit_cache_hook = about_to_compile
    module.compilation.listener = compiled
    return "jit_cache_hook and listener are ours, and call what was there"


def _tokens_on_stack() -> int:
    """The token count of the launch that led to a Triton compile, from the launching frame's arguments."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "run" and frame.f_globals.get("__name__") == "triton.runtime.jit":
            return token_count(frame.f_locals.get("args", ()))
        frame = frame.f_back
    return 0


def _examine_aiter(module: ModuleType) -> Verdict:
    build = getattr(module, "build_module", None)
    if not callable(build):
        return refused("aiter.jit.core has no build_module")
    first = next(iter(inspect.signature(build).parameters), "")
    return READY if first == "md_name" else refused(f"build_module begins with {first!r}, not with md_name")


def _install_aiter(module: Any, compiles: Compiles) -> str:
    original = module.build_module

    @functools.wraps(original)
    def build_watched(md_name: str, *args: Any, **kwargs: Any) -> Any:
        with compiles.watch("aiter", md_name, md_name, 0) as compile_:
            compile_.source = "compiled"
            return original(md_name, *args, **kwargs)

    module.build_module = build_watched
    return "build_module is watched"
