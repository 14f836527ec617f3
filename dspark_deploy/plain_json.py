"""JSON that somebody else wrote: whatever is wrong with it is a ValueError.

Python's parser raises RecursionError for text that is nested beyond its stack, which readers of files would
all have to know.
"""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def json_lines(text: str) -> list[tuple[int, str]]:
    """Number, from 1, and text of each line of a JSON Lines text that isn't blank.

    Split at line feeds alone: `str.splitlines` splits at U+2028 and others too, which a JSON text may hold.
    """
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
