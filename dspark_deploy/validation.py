"""What pydantic found wrong with a file, as lines for the person who has it.

Not covered: profiles, whose faults name file and line (`profile.loading`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


def fault_lines(error: ValidationError) -> list[str]:
    """One line per fault: where in the document, and what should be there."""
    return [
        f"{'.'.join(map(str, fault['loc'])) or 'the whole'}: {fault['msg'].removeprefix('Value error, ')}"
        for fault in error.errors(include_url=False)
    ]


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say of a key that nothing reads: the nearest one that something does, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1)
    return f"unknown key; did you mean {close[0]!r}?" if close else f"unknown key; known: {', '.join(names)}"
