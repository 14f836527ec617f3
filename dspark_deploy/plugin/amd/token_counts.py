"""Token counts at which the mHC dispatch may choose another kernel, read from the dispatch code itself.

A kernel's key does not hold the token count: the count only decides which kernel is taken, by comparison with
a constant. So the constants of the code that decides, and their neighbours, are where a choice can change.
Every integer is taken, in a function's code or in a module, whatever it is for: one too many costs a fraction
of a second of warm-up, one too few a compile while serving.

AITER chooses by tables of its own; its two functions of the token count are asked for every count, and the
first count of each answer is kept. `tests/warmup` holds the result against every token count there is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

DISPATCH_MODULES = (
    "vllm.model_executor.layers.mhc",
    "vllm.model_executor.kernels.mhc.tilelang",
    "vllm.model_executor.kernels.mhc.tilelang_kernels",
    "vllm.model_executor.kernels.mhc.warmup",
    "vllm.model_executor.kernels.mhc.aiter",
    "vllm.model_executor.kernels.mhc.triton",
    "aiter.ops.mhc",
)
# A module of many libraries' operators: only what is about mHC.
BY_NAME = (("vllm._aiter_ops", "mhc"),)


def token_counts(max_tokens: int, capture_sizes: Iterable[int], hidden: int, streams: int) -> list[int]:
    """Token counts to warm, ascending, from 1 to `max_tokens`.

    `capture_sizes` are the token counts of captured graphs. `hidden` and `streams` are the model's hidden
    size and its number of mHC streams, by which AITER's tables are asked.
    """
    counts = {1, 2, max_tokens, *capture_sizes, *aiter_counts(max_tokens, hidden, streams)}
    power = 2
    while power <= max_tokens:  # Triton and AITER round up to powers of two
        counts |= {power - 1, power, power + 1}
        power *= 2
    for constant in dispatch_constants():
        counts |= {constant - 1, constant, constant + 1}
    return sorted(count for count in counts if 1 <= count <= max_tokens)


def dispatch_constants() -> set[int]:
    """Every integer above 1 in the loaded dispatch modules and in the code of their functions."""
    found: set[int] = set()
    for name in DISPATCH_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            found |= set(_integers(vars(module).values()))
            for code in _codes(vars(module).values(), name):
                found |= set(_integers(code.co_consts))
    for name, part in BY_NAME:
        module = sys.modules.get(name)
        for code in _codes(vars(module).values(), name) if module is not None else ():
            if part in code.co_name:
                found |= set(_integers(code.co_consts))
    return found


def _integers(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            yield value
        elif isinstance(value, tuple):
            yield from _integers(value)


def _codes(values: Iterable[Any], module: str) -> Iterator[CodeType]:
    """Code of the functions and methods that `module` defines, with what is nested in them."""
    for value in list(values):
        function = getattr(value, "__wrapped__", value)  # as behind functools.cache
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if isinstance(function, FunctionType) and function.__module__ == module:
            yield from _nested(function.__code__)
        elif isinstance(value, type) and value.__module__ == module:
            yield from _codes(vars(value).values(), module)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def aiter_counts(max_tokens: int, hidden: int, streams: int) -> set[int]:
    """The first token count of each configuration that AITER's own tables give; empty without AITER."""
    module: ModuleType | None = sys.modules.get("aiter.ops.mhc")
    counts: set[int] = set()
    for name, size in (("get_mhc_pre_splitk", streams * hidden), ("get_mhc_fused_post_pre_config", hidden)):
        table = getattr(module, name, None)
        if table is None:
            continue
        seen: dict[Any, int] = {}
        for tokens in range(1, max_tokens + 1):
            seen.setdefault(table(tokens, size), tokens)
        counts |= set(seen.values())
    return counts
