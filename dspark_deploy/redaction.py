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
# A password may hold what a URL should have escaped, `/` and `@` among it; to hide too much harms nobody.
_USERINFO = re.compile(r"""(?<=://)(?:[^/@\s:]*:[^\s"'<>]*|[^/@\s]+)(?=@)""")
_PARAMETER = re.compile(
    rf"""(?<=[?&])([^=&\s"'<>]*(?:{_NAME.pattern})[^=&\s"'<>]*)=[^&#\s"'<>]+""", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a variable, a flag or a key of this name holds a secret."""
    return _NAME.search(name) is not None


def mask_urls(text: str) -> str:
    """`text` without user and password in its URLs, nor secret parameters."""
    return _PARAMETER.sub(rf"\1={REDACTED}", _USERINFO.sub(REDACTED, text))


def mask_assignment(text: str) -> str:
    """`path=value` as `--set` takes it, without a value that holds a secret."""
    name, equals, value = text.partition("=")
    nested = value.lstrip().startswith(("{", "[")) and is_secret(value)
    hidden = equals and (nested or is_secret(name.rpartition(".")[2]))
    return f"{name}={REDACTED}" if hidden else mask_urls(text)


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
