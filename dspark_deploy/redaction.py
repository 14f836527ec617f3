"""What must not be shown: values of secret names, passwords inside URLs, and values that look like secrets.

Used wherever a command, an environment or a profile reaches a terminal, a log, a report or a message. Names
are judged by what they say (`HF_TOKEN`, `api-key`); `tokens`, `tokenizer` and `num_key_heads` are no secrets.
Values are judged by their shape: keys with the prefix of their issuer, private keys, JSON web tokens,
`Bearer ...`, `user:password@host`, and a secret name with a value inside text, `key=value`, a header or JSON.

Not covered: a secret without such a shape under a name that does not say it. Nothing tells it from a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dspark_deploy.plain_json import parse_json

REDACTED = "<redacted>"
# `PWD` alone is the working folder; `SESSION_TIMEOUT` and the like are settings.
_NAME = re.compile(
    r"TOKEN(?!S|IZ)|KEY|SECRET|PASSW|PASSPHRASE|CRED|AUTH(?!OR(?!IZATION))|COOKIE|OTLP\w*HEADERS"
    r"|PW(?![A-Z0-9])|(?<=[_-])PWD(?![A-Z0-9])|SESSION(?:[_-]?ID)?(?![A-Z0-9_-])",
    re.IGNORECASE,
)
# A password may hold what a URL should have escaped, `/` and `@` among it; to hide too much harms nobody.
_USERINFO = re.compile(r"""(?<=://)(?:[^/@\s:]*:[^\s"'<>]*|[^/@\s]+)(?=@)""")
_PARAMETER = re.compile(
    rf"""(?<=[?&])([^=&\s"'<>]*(?:{_NAME.pattern})[^=&\s"'<>]*)=[^&#\s"'<>]+""", re.IGNORECASE
)

# Prefixes that issuers give their keys so that they are found.
_ISSUED = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL)
# What only refers to a variable, `${NAME}`, is no secret.
_VALUE = r"""(?!\$\{)(?:"[^"]*"|'[^']*'|[^\s"',;&}]+)"""
_SAYS = rf"[\w.-]{{0,64}}(?:{_NAME.pattern})[\w.-]{{0,64}}"
_SCHEME = re.compile(r"\b(Bearer(?:\s+|%20))(?!\$\{)[^\s\"',;]+", re.IGNORECASE)
_HEADER = re.compile(
    rf"^(\s*{_SAYS}\s*:\s*(?:(?:Basic|Bearer|Token|Digest)\s+)?)(?!(?:\w+\s+)?\$\{{|{REDACTED}|\s).+$",
    re.IGNORECASE | re.MULTILINE,
)
_ASSIGNED = re.compile(rf"(?<![\w./-])({_SAYS}\s*=\s*){_VALUE}", re.IGNORECASE)
_FLAG = re.compile(rf"(?<![\w./-])(--{_SAYS}\s+)(?!-){_VALUE}", re.IGNORECASE)
_MEMBER = re.compile(rf"""([{{,]\s*["']?{_SAYS}["']?\s*:\s*){_VALUE}""", re.IGNORECASE)
# `image:tag@sha256:...` is an image, `mailto:` an address, and `//` was a URL's.
_BARE_USERINFO = re.compile(
    r"""(?<![^\s"'=,;])(?!mailto:)[^\s:@/"'=,;]+:(?!//|\$\{[A-Za-z_]\w*\}@)[^\s@"']+(?=@(?!sha\d+:)[\w\[])"""
)


def is_secret(name: str) -> bool:
    """Whether a variable, a flag or a key of this name holds a secret."""
    return not name.lower().startswith("num_") and _NAME.search(name) is not None


def mask_credentials(text: str) -> str:
    """`text` without what nothing else looks like: passwords and secret parameters of URLs, issued keys.

    For messages and logs, where a colon or an equals sign behind a word like `key` mostly is no secret.
    """
    text = _PARAMETER.sub(rf"\1={REDACTED}", _USERINFO.sub(REDACTED, text))
    for pattern in (_PRIVATE_KEY, _ISSUED):
        text = pattern.sub(REDACTED, text)
    return _SCHEME.sub(rf"\g<1>{REDACTED}", text)


def mask_text(text: str) -> str:
    """`text` without what looks like a secret: `mask_credentials`, and the module's other shapes."""
    if text.lstrip().startswith(("{", "[")):
        try:
            value = parse_json(text)
            shown = redacted(value)
        except (ValueError, RecursionError):
            pass  # no JSON, or too deep for us: its text is searched below
        else:
            return text if shown == value else json.dumps(shown)
    text = _BARE_USERINFO.sub(REDACTED, mask_credentials(text))
    for pattern in (_HEADER, _ASSIGNED, _FLAG, _MEMBER):
        text = pattern.sub(rf"\g<1>{REDACTED}", text)
    return text


def mask_assignment(text: str) -> str:
    """`path=value` as `--set` takes it, without a value that holds a secret."""
    name, equals, value = text.partition("=")
    nested = value.lstrip().startswith(("{", "[")) and is_secret(value)
    hidden = equals and (nested or is_secret(name.rpartition(".")[2]))
    return f"{name}={REDACTED}" if hidden else f"{mask_text(name)}{equals}{mask_text(value)}"


def redacted(value: Any) -> Any:
    """Plain values with secrets replaced, at any depth."""
    if isinstance(value, Mapping):
        return {
            key: REDACTED if is_secret(str(key)) and inner is not None else redacted(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return mask_text(value) if isinstance(value, str) else value


def masked(value: Any) -> Any:
    """Plain values with what looks like a secret replaced in every text, whatever its key is called.

    For documents whose keys are known to name no secret: `bos_token_id`, `api_key_set`.
    """
    if isinstance(value, Mapping):
        return {key: masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return mask_text(value) if isinstance(value, str) else value
