"""vLLM's flags as a command line has them, brought into the form of `engine.args`.

    -tp 8 --enforce_eager --no-async-scheduling -cc.mode=3    what follows -- on dspark-serve's command line

Rules look at one mapping of names to values, so that a launch is judged the same whichever way it is written.
What vLLM's own parser does is followed: dashes for underscores, short names, `--no-name`, `-O3`, keys of JSON
flags behind a dot, and the last of what is given twice. Keys behind a dot take the place of the whole flag.
Texts that the parser reads as numbers or JSON objects are those, in a profile too.

Not covered: which flags there are, and how many values each takes; names that are cut short stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_deploy.plain_json import parse_json
from dspark_deploy.profile.schema import ArgValue, Profile

# vLLM's short names, which begin with one dash.
SHORT = {
    "ac": "attention-config",
    "asc": "api-server-count",
    "cc": "compilation-config",
    "dc": "diffusion-config",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpa": "data-parallel-address",
    "dpb": "data-parallel-backend",
    "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb",
    "dpl": "data-parallel-size-local",
    "dpm": "data-parallel-multi-port-external-lb",
    "dpn": "data-parallel-rank",
    "dpp": "data-parallel-rpc-port",
    "dpr": "data-parallel-start-rank",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "O": "optimization-level",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "r": "node-rank",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}
COMPILATION = "compilation-config"
# Flags that may stand inside compilation-config instead, by their key there.
WITHIN = {
    "cudagraph-capture-sizes": "cudagraph_capture_sizes",
    "max-cudagraph-capture-size": "max_cudagraph_capture_size",
}
APPENDED = ("middleware",)  # each value wants the flag once more
_NUMBER = re.compile(r"-?\d{1,18}|-?\d{0,18}\.\d{1,18}")


@dataclass(frozen=True, slots=True)
class Flags:
    """`args` as in `engine.args`; names that were `repeated`; parts `unread`, which belong to no flag."""

    args: dict[str, ArgValue] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def parse_flags(parts: Sequence[str]) -> Flags:
    """The flags of a command line. What vLLM could not read is kept as it is, never an error here."""
    whole: dict[str, ArgValue] = {}
    dotted: dict[str, dict[str, object]] = {}
    repeated: list[str] = []
    unread: list[str] = []
    for name, texts in _grouped(parts, unread):
        flag, dot, key = name.partition(".")
        positive = flag.removeprefix("no-")
        if dot:
            unread += texts[1:]
            if not _put(dotted.setdefault(flag, {}), key, texts[0] if texts else ""):
                repeated.append(name)
            continue
        if positive in APPENDED and positive in whole:
            texts = [*_texts(whole[positive]), *texts]
        elif positive in whole:
            repeated.append(positive)
        if positive == flag:
            whole[flag] = _value(texts)
        else:
            whole[positive] = False
            unread += texts
    repeated += [flag for flag in dotted if flag in whole]
    return Flags({**whole, **dotted}, tuple(dict.fromkeys(repeated)), tuple(unread))


def is_flag(part: str) -> bool:
    """Whether a part of a command line is read as a flag, and not as the value of the one before."""
    return _named(part) is not None


def as_vllm_reads(profile: Profile, flags: Flags) -> Profile:
    """The profile with `flags` over its `engine.args`, where a key behind a dot is inside its flag.

    What compilation-config has of `WITHIN` stands as those flags, where they are not given themselves.
    Nothing is validated: what only a flag after -- can set is for the rules to refuse.
    """
    args: dict[str, ArgValue] = {}
    dotted: dict[str, dict[str, object]] = {}
    for name, value in profile.engine.args.items():
        flag, dot, key = name.partition(".")
        if not dot:
            args[name] = as_read(value)
        elif value is not None:
            _nest(dotted.setdefault(flag, {}), key.split("."), value)
    args |= dotted
    for name in flags.args:
        args.pop(f"no-{name}", None)
    args |= flags.args
    inside = args.get(COMPILATION)
    if isinstance(inside, dict):
        for name, key in WITHIN.items():
            found: Any = inside.get(key)
            if found is not None and args.get(name) is None:
                args[name] = found
    engine = profile.engine.model_copy(update={"args": args})
    return profile.model_copy(update={"engine": engine})


def as_read(value: ArgValue) -> ArgValue:
    """A value of `engine.args` as vLLM's parser reads its text: "8" is a number, '{"mode": 0}' an object."""
    if isinstance(value, list):
        return [_value([each]) if isinstance(each, str) else each for each in value]
    read: ArgValue = _value([value]) if isinstance(value, str) else value
    return read


def _texts(value: ArgValue) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def _grouped(parts: Sequence[str], unread: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag's name with the texts up to the next flag; texts before the first go to `unread`."""
    name, texts = "", unread
    for part in parts:
        named = _named(part)
        if named is None:
            (unread if part == "--" else texts).append(part)
            continue
        if name:
            yield name, texts
        name, value = named
        texts = [] if value is None else [value]
    if name:
        yield name, texts


def _named(part: str) -> tuple[str, str | None] | None:
    """A flag's long name without dashes, and its value where it is in the same part; None for a value."""
    if len(part) < 2 or not part.startswith("-") or _NUMBER.fullmatch(part):
        return None
    spelt, equals, text = part.partition("=")
    if " " in spelt:
        return None
    flag, dot, key = spelt.lstrip("-").partition(".")
    value = text if equals else None
    if part.startswith("--"):
        flag = flag.replace("_", "-")
    elif flag in SHORT:
        flag = SHORT[flag]
    elif flag[:1] in SHORT:  # -n2, -O3
        flag, dot, key, value = SHORT[flag[0]], "", "", part[2:].removeprefix("=")
    else:
        longer = [name for name in SHORT if name.startswith(flag)]
        flag = SHORT[longer[0]] if len(longer) == 1 else f"-{flag}"  # no name that vLLM has
    return (f"{flag}{dot}{key}", value) if flag else None


def _put(inner: dict[str, object], key: str, text: str) -> bool:
    """Put a text under a dotted key, as vLLM's parser does; False where something was there."""
    value: object = text.split(",") if key.endswith("+") else _value([text], anything=True)
    return _nest(inner, key.removesuffix("+").split("."), value)


def _nest(inner: dict[str, object], keys: Sequence[str], value: object) -> bool:
    for key in keys[:-1]:
        below = inner.get(key)
        if not isinstance(below, dict):
            below = inner[key] = {}
        inner = below
    last, new = keys[-1], keys[-1] not in inner
    before = inner.get(last)
    if isinstance(before, list) and isinstance(value, list):
        inner[last] = [*before, *value]
        return True
    inner[last] = value
    return new


def _value(texts: Sequence[str], anything: bool = False) -> Any:
    """No text is true, several are a list. Numbers and JSON objects are read, with `anything` all of JSON."""
    if not texts:
        return True
    if len(texts) > 1:
        return [_value([text]) for text in texts]
    text = texts[0]
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    if anything or text.lstrip().startswith("{"):
        try:
            return parse_json(text)
        except ValueError:  # a word stands for itself; what ought to be JSON is for the rules
            return text
    return text
