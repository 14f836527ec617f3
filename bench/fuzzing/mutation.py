"""New inputs from seeds: bytes changed, pieces moved, numbers and words replaced by those that break parsers.

Reproducible: everything is drawn from the generator that is given. Not covered: feedback from coverage, which
atheris has.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

MOST_BYTES = 20_000  # of an input that grows; a seed may be larger
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
WORD = re.compile(rb"[A-Za-z_][\w-]{2,}")
NUMBERS = (
    *(b"0", b"-1", b"1e999", b"nan", b"NaN", b"-Infinity", b".inf", b"1" * 5000, b"9" * 20, b"0x1F", b"1_0"),
    *(b"1.7976931348623157e308", b"-9223372036854775809", b"00", b"1.2.3", b"4" * 310, b"2026-13-45"),
)
TEXTS = (
    *(b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\xf0\x9f\x98\x80", b"\r", b"\n", b"\t", b"''"),
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b"null",
        b"true",
        b"~",
        b"!!python/name:os.system",
        b"&a",
        b"*a",
        b"<<: ",
    ),
    *(b"? ", b"- ", b": ", b"|\n", b"#", b",", b"[" * 2000, b"{a: " * 500, b'{"a":' * 500, b"\\ud800"),
    *(
        b"</think>",
        b"#### ",
        b"${A}",
        b"../",
        b"%s",
        b"{0}",
        b"seconds=",
        b"tokens=",
        b"_total",
        b'{engine="',
    ),
    *(b'le="', b"# TYPE x counter\n", b"____"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**400, 1e308, float("nan"), float("inf"), "", "\0", "\ud800", "x" * 5000, [], {}),
    *([[]], {"": None}, [None], "5", "../x", 2**63, {"a": {"a": {"a": []}}}),
)


def mutate(seeds: Sequence[bytes], draw: random.Random) -> bytes:
    """One new input: a seed after one to six changes."""
    data = draw.choice(seeds)
    if draw.random() < 0.3 and (changed := _in_json(data, draw)) is not None:
        return changed
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        data = draw.choice(CHANGES)(data, seeds, draw)[: max(MOST_BYTES, len(data))]
    return data


def _flip(data: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    if not data:
        return bytes([draw.randrange(256)])
    at = draw.randrange(len(data))
    return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]


def _insert(data: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    at = draw.randint(0, len(data))
    return data[:at] + draw.choice(TEXTS) + data[at:]


def _remove(data: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    first, last = sorted(draw.randint(0, len(data)) for _ in range(2))
    return data[:first] + data[min(last, first + draw.choice((1, 4, 64, 10**6))) :]


def _repeat(data: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    first, last = sorted(draw.randint(0, len(data)) for _ in range(2))
    return data[:last] + data[first:last] * draw.choice((1, 1, 2, 50)) + data[last:]


def _splice(data: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    other = draw.choice(seeds)
    return data[: draw.randint(0, len(data))] + other[draw.randint(0, len(other)) :]


def _swap_lines(data: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return b"\n".join(lines)


def _number(data: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    return _replaced(data, NUMBER, draw, NUMBERS)


def _word(data: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    words = WORD.findall(draw.choice(seeds))
    return _replaced(data, WORD, draw, [*TEXTS, *words] if draw.random() < 0.5 else words or TEXTS)


def _replaced(data: bytes, pattern: re.Pattern[bytes], draw: random.Random, by: Sequence[bytes]) -> bytes:
    found = list(pattern.finditer(data))
    if not found:
        return data
    chosen = draw.choice(found)
    return data[: chosen.start()] + draw.choice(by) + data[chosen.end() :]


CHANGES = (_flip, _insert, _remove, _repeat, _splice, _swap_lines, _number, _number, _word, _word)


def _in_json(data: bytes, draw: random.Random) -> bytes | None:
    """A JSON document, or one line of JSON lines, with one value replaced; None where it is neither."""
    lines = data.split(b"\n")
    number = draw.randrange(len(lines))
    for text, rebuild in ((data, None), (lines[number], number)):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            continue
        places = list(_places(document))
        if not places:
            return None
        holder, key = draw.choice(places)
        holder[key] = draw.choice(VALUES)
        changed = json.dumps(document).encode()
        if rebuild is None:
            return changed
        lines[rebuild] = changed
        return b"\n".join(lines)
    return None


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a document, as what holds it and its key there."""
    if isinstance(document, dict | list):
        for key in list(document) if isinstance(document, dict) else range(len(document)):
            yield document, key
            yield from _places(document[key])


def misspelt(document: dict[str, Any], free: Sequence[tuple[str, ...]], draw: random.Random) -> str:
    """Misspell one key, in place, and return it. Keys below a path of `free` are a person's choice."""
    found = [
        (holder, key)
        for holder, key, path in _keys(document, ())
        if not any(path[: len(each)] == each for each in free)
    ]
    holder, key = draw.choice(found)
    at = draw.randrange(len(key))
    less, more = key[:at] + key[at + 1 :], key[: at + 1] + key[at:]
    wrong = draw.choice((less, more, f"{key}s", key.upper(), f"x{key}"))
    while not wrong or wrong in holder:
        wrong += "x"
    holder[wrong] = holder.pop(key)
    return wrong


def _keys(document: Any, path: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str, tuple[str, ...]]]:
    """Every key, with what holds it and the path of what holds it; a list adds nothing to a path."""
    if isinstance(document, dict):
        for key, value in list(document.items()):
            yield document, key, path
            yield from _keys(value, (*path, key))
    elif isinstance(document, list):
        for value in document:
            yield from _keys(value, path)
