"""What a pass asks for: TileLang kernels by key, and which implementation served each mHC operator.

While `recording()` is on, a call of a TileLang kernel is written down and not launched; everything else runs.
The key is TileLang's own, from the same parsing of arguments that a launch does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dspark_deploy.plugin.amd.capture_guard import kernel_name, tilelang_key

PROVIDERS = ("aiter", "tilelang", "triton")


@dataclass(slots=True)
class Request:
    """One kernel asked for. `args` and `kwargs` are the call's, with tensors on the meta device."""

    jit: Any
    key: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int

    @property
    def kernel(self) -> str:
        """The kernel function's name."""
        return kernel_name(self.jit)


@dataclass(slots=True)
class Recorded:
    """`requests` by kernel and key; `routes[operator][provider]` counts calls."""

    requests: dict[tuple[str, Any], Request] = field(default_factory=dict)
    routes: dict[str, Counter[str]] = field(default_factory=dict)
    tokens: int = 0

    def route(self, operator: str, provider: str) -> None:
        """Count one call of an operator that `provider` served."""
        self.routes.setdefault(operator, Counter())[provider] += 1


@contextlib.contextmanager
def recording(operators: dict[str, Any]) -> Iterator[Recorded]:
    """Record what is asked for while the block runs. `operators` are a model's mHC operators."""
    recorded = Recorded()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_tilelang_requests(recorded))
        stack.enter_context(_routes(recorded, operators))
        yield recorded


@contextlib.contextmanager
def _tilelang_requests(recorded: Recorded) -> Iterator[None]:
    if importlib.util.find_spec("tilelang") is None:
        yield
        return
    # The attribute `tilelang.jit` is the decorator; the module is reached by its name.
    implementation: Any = importlib.import_module("tilelang.jit").JITImpl
    launch = implementation.__call__

    def ask(self: Any, *args: Any, **kwargs: Any) -> None:
        key = tilelang_key(self, args, kwargs)
        name = (kernel_name(self), key)
        if name not in recorded.requests:
            meta = {k: _on_meta(v) for k, v in kwargs.items()}
            recorded.requests[name] = Request(self, key, tuple(map(_on_meta, args)), meta, recorded.tokens)

    implementation.__call__ = ask
    try:
        yield
    finally:
        implementation.__call__ = launch


def _on_meta(value: Any) -> Any:
    """A tensor's type, shape and strides without its memory; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@contextlib.contextmanager
def _routes(recorded: Recorded, operators: dict[str, Any]) -> Iterator[None]:
    from torch.utils._python_dispatch import TorchDispatchMode

    open_operators: list[list[str]] = []

    class Watch(TorchDispatchMode):
        """Sees each registered vLLM operator that is called, and lets it run."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, _, name = func._schema.name.partition("::")
            provider = name.rpartition("_")[2]
            if namespace == "vllm" and provider in PROVIDERS and name.startswith(("mhc_", "hc_")):
                if open_operators:
                    open_operators[-1].append(provider)
                else:  # called by a model, past every operator class
                    recorded.route(name, provider)
            return func(*args, **(kwargs or {}))

    def entered(_module: Any, _args: Any) -> None:
        open_operators.append([])

    def left(module: Any, _args: Any, _result: Any) -> None:
        seen = open_operators.pop()
        # An operator that called another one of these counts for neither.
        if not seen and any(type(child).__module__ == type(module).__module__ for child in module.children()):
            seen = ["torch"]
        for provider in seen or ["torch"]:
            recorded.route(type(module).__name__, provider)

    hooks = [op.register_forward_pre_hook(entered) for op in _distinct(operators)]
    hooks += [op.register_forward_hook(left) for op in _distinct(operators)]
    try:
        with Watch():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _distinct(operators: dict[str, Any]) -> list[Any]:
    return list({id(operator): operator for operator in operators.values()}.values())
