"""What a twin was written against: a digest of a kernel's source, and of all that the source calls.

A kernel's own lines don't say what it computes, since the arithmetic sits in helper kernels and module
constants; so the digest follows every name that is a kernel or a `tl.constexpr` in the module's globals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from dspark_deploy.plugin.source import function_text


def fingerprint(target: Any) -> str:
    """Of a kernel, or of a plain function's own source: sixteen hexadecimal digits.

    Raises OSError where the source can't be read.
    """
    digest = hashlib.sha256()
    is_kernel = hasattr(target, "fn")
    for part in _parts(target, set()) if is_kernel else [function_text(target)]:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _parts(kernel: Any, seen: set[str]) -> Iterator[str]:
    function = kernel.fn
    yield function_text(function)
    for name in sorted(set(function.__code__.co_names) & function.__globals__.keys()):
        if name in seen:
            continue
        seen.add(name)
        value = function.__globals__[name]
        if hasattr(value, "fn") and hasattr(value, "arg_names"):
            yield from _parts(value, seen)
        elif type(value).__name__ == "constexpr":
            yield f"{name} = {value.value!r}"
