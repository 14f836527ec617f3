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
