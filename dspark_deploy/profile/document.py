"""A YAML file as plain values plus the place of each: which file, which line.

Stricter than YAML on purpose: duplicate keys, anchors and tags are faults, since each of them is a way for
a profile to say something else than it seems to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_deploy.errors import InputError

Path_ = tuple[str | int, ...]
MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_BITS = 64  # of an integer: no setting needs more, and nobody can print one of 4300 digits


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: `mi355x.yaml:14`, or `--set` for one from the command line."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(slots=True)
class Document:
    """Values and their places. `places` is keyed by the path of keys and list indices."""

    values: dict[str, Any]
    places: dict[Path_, Place]


def read_document(path: Path) -> Document:
    """Parse one file. Raises InputError with every fault found and its line."""
    name = path.name
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: {len(raw)} bytes is no profile; the limit is {MAX_BYTES}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    return parse_document(text, name)


def parse_document(text: str, name: str) -> Document:
    """Parse `text`, called `name` in messages. Raises InputError."""
    try:
        _refuse_unread(text, name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InputError(_yaml_message(error, name)) from error
    except RecursionError as error:
        raise InputError(f"{name}: nested too deeply; the limit is {MAX_DEPTH} levels") from error
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"{name}:1: a profile is a mapping of keys to values, and this file is not")
    faults: list[str] = []
    places: dict[Path_, Place] = {}
    values = _build(root, (), name, places, faults)
    if faults:
        raise InputError(faults)
    return Document(values, places)


def _refuse_unread(text: str, name: str) -> None:
    """Faults that the stream of events shows, before anything is built from it."""
    faults = []
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise InputError(f"{name}:{_line(event)}: nested too deeply; the limit is {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            faults.append(
                f"{name}:{_line(event)}: anchors (&, *) are not read; use 'extends' to share settings"
            )
        tag = getattr(event, "tag", None)
        if tag:
            faults.append(f"{name}:{_line(event)}: tag {tag!r}: tags (!) are not read; take it out")
        if isinstance(event, yaml.ScalarEvent) and "\0" in event.value:
            faults.append(f"{name}:{_line(event)}: a NUL character; nothing it could mean fits a setting")
    if faults:
        raise InputError(faults)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


def _yaml_message(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    return f"{where}: not YAML: {problem}"


def _build(node: yaml.Node, path: Path_, name: str, places: dict[Path_, Place], faults: list[str]) -> Any:
    line = node.start_mark.line + 1
    places[path] = Place(name, line)
    if len(path) > MAX_DEPTH:
        faults.append(f"{name}:{line}: nested too deeply; the limit is {MAX_DEPTH} levels")
        return None
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key, key_line, value_node in _items(node, name, faults):
            if key in result:
                faults.append(f"{name}:{key_line}: {dotted((*path, key))}: given twice; keep one")
            result[key] = _build(value_node, (*path, key), name, places, faults)
            places[(*path, key)] = Place(name, key_line)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, i), name, places, faults) for i, item in enumerate(node.value)]
    try:
        value = yaml.SafeLoader.construct_object(yaml.SafeLoader(""), node)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ValueError(f"an integer of more than {MAX_BITS} bits")
        return value
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        problem = getattr(error, "problem", None) or str(error)
        faults.append(f"{name}:{line}: {dotted(path)}: {problem}")
        return None


def _items(node: yaml.MappingNode, name: str, faults: list[str]) -> Iterator[tuple[str, int, yaml.Node]]:
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
            shown = getattr(key_node, "value", "?")
            hint = f"write it as '{shown}' in quotes" if isinstance(shown, str) else "use a plain word"
            faults.append(f"{name}:{line}: key {shown!r} is not text; {hint}")
            continue
        yield key_node.value, line, value_node


def dotted(path: Path_) -> str:
    """`("speculative", "verification", 0)` as `speculative.verification[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
