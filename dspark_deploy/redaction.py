"""What must not be shown: values of secret names, and passwords inside URLs.

Used wherever a command, an environment or a profile reaches a terminal, a log, a report or a message. Names
are judged by what they say (`HF_TOKEN`, `api-key`); `tokens` and `tokenizer` are no secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"
_NAME = re.compile(r"TOKEN(?!S|IZ)|KEY|SECRET|PASSW|PASSPHRASE|CRED|AUTH(?!OR)", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a variable, a flag or a key of this name holds a secret."""
    return _NAME.search(name) is not None


def mask_urls(text: str) -> str:
    """`text` without user and password in its URLs."""
    return _USERINFO.sub(REDACTED, text)


def redacted(value: Any) -> Any:
    """Plain values with secrets replaced, at any depth."""
    if isinstance(value, Mapping):
        return {
            key: REDACTED if is_secret(str(key)) and inner is not None else redacted(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return mask_urls(value) if isinstance(value, str) else value
