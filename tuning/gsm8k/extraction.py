"""How a number is read from an answer to a GSM8K question: three readings, each with its owner.

    strict      the first `#### number` of the visible answer (lm-evaluation-harness, `gsm8k`)
    flexible    the same, else the last number before a run-on into an invented next question
    upstream    the last run of digits, without sign and decimals: vLLM's `tests/evals/gsm8k/gsm8k_eval.py`

Thinking, up to its end, is removed first: a model recites the shots in there, markers and all
(lm-evaluation-harness#3438). Numbers are compared as numbers: `$29.00` is 29, `70,000` is 70000.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

END_OF_THINKING, START_OF_THINKING = "</think>", "<think>"
MARKER = re.compile(r"####\s*(\S+)")
NUMBER = re.compile(r"-?[$€£]?\d[\d,]*(?:\.\d+)?")
RUN_ON = re.compile(r"\n\s*(?:Question:|Q:)")
DIGITS = re.compile(r"\d+")


def visible(text: str) -> str | None:
    """The answer without its thinking; None where thinking began and never ended."""
    if END_OF_THINKING in text:
        return text.rpartition(END_OF_THINKING)[2]
    return None if START_OF_THINKING in text else text


def normalized(text: str) -> str | None:
    """A number in one form: no currency, separators or trailing zeros; None where it is none."""
    bare = re.sub(r"[$€£,\s]", "", text).rstrip(".")
    try:
        number = Decimal(bare)
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    return f"{number.normalize():f}" if number else "0"


def strict(text: str) -> str | None:
    """The number behind the first marker of the visible answer."""
    shown = visible(text)
    marker = MARKER.search(shown) if shown else None
    found = NUMBER.match(marker[1]) if marker else None
    return normalized(found[0]) if found else None


def flexible(text: str) -> str | None:
    """The strict answer, else the last number before the answer runs on into another question."""
    if (marked := strict(text)) is not None:
        return marked
    shown = visible(text)
    numbers = NUMBER.findall(RUN_ON.split(shown, maxsplit=1)[0]) if shown else []
    return normalized(numbers[-1]) if numbers else None


def upstream(text: str) -> str | None:
    """vLLM's own reading. A run of digits with a leading zero is no number to Python, and none to it."""
    found = DIGITS.findall(text.replace(",", ""))
    if not found or (found[-1].startswith("0") and found[-1].strip("0")):
        return None
    try:
        return str(int(found[-1]))
    except ValueError:  # over 4300 digits, of which Python, and so vLLM, reads no number
        return None


def gold(answer: str) -> str:
    """The number of a GSM8K solution. Raises ValueError where there is none."""
    found = strict(answer)
    if found is None:
        raise ValueError(f"no number behind ####: {answer[-60:]!r}")
    return found
