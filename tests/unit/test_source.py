"""The cheap reading of a function's text agrees with `inspect` on functions of every shape."""

import functools
import inspect
import json.decoder
import textwrap

import pytest

from dspark_deploy.plugin.source import function_text


def plain(a, b=1):
    """Text."""
    return a + b

    # a comment at its end


# a comment between


@functools.wraps(plain)
def decorated(*values):
    text = """
    a string of several lines
"""

    return text, values


class Holder:
    def method(self):
        return self


def factory():
    def inner():
        return 1

    return inner


@pytest.mark.parametrize(
    "function",
    [
        plain,
        decorated.__wrapped__,
        Holder.method,
        factory(),
        factory,
        textwrap.dedent,
        json.decoder.py_scanstring,
    ],
)
def test_as_inspect_reads_it(function):
    ours, theirs = function_text(function), textwrap.dedent(inspect.getsource(function))
    assert ours.startswith(theirs), "a trailing comment of the function may be ours in addition"
    assert all(line.strip().startswith("#") or not line.strip() for line in ours[len(theirs) :].splitlines())


def test_a_decorated_function_has_its_decorators():
    function = functools.lru_cache(plain).__wrapped__
    assert function_text(function).startswith("def plain(a, b=1):")
    assert "    # a comment at its end\n" in function_text(plain)


def test_a_function_without_a_file_is_an_oserror():
    scope = {}
    exec("def made():\n    return 1\n", scope)
    with pytest.raises(OSError, match=r"could not get source|source code not available"):
        function_text(scope["made"])
