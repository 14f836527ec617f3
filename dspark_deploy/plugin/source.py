"""The text of a function, read cheaply: a worker's start reads dozens.

`inspect.getsource` tokenizes from the function on, a millisecond and more for a long kernel. A function at
the top of its file ends where the next line without indentation begins, which needs no tokens.

Not covered: classes, and lines that a string carries to the start of a line.
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any


def function_text(function: Callable[..., Any]) -> str:
    """A function's lines, decorators included, as `textwrap.dedent(inspect.getsource(function))` gives them.

    Raises OSError where the file can't be read.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename)
    begin = code.co_firstlineno - 1
    ends = [end for _, end, _, _ in code.co_positions() if end is not None]
    if not lines or not ends or max(ends) > len(lines) or lines[begin][:1].isspace():
        return textwrap.dedent(inspect.getsource(function))
    last = max(ends)
    while last < len(lines) and (not lines[last].strip() or lines[last][:1].isspace()):
        last += 1
    while not lines[last - 1].strip():
        last -= 1
    return "".join(lines[begin:last])
