"""`load_profile`: file, then its parents (`extends`), then `--set`, validated, all faults at once.

A name without a folder that is no file here is looked up among the profiles shipped in the package, so
`--profile cpu-tiny.yaml` works from anywhere; which file was taken is logged.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dspark_deploy.errors import InputError
from dspark_deploy.profile.document import Document, Path_, Place, dotted, parse_document, read_document
from dspark_deploy.profile.flags import Flags, as_vllm_reads, parse_flags
from dspark_deploy.profile.schema import Profile
from dspark_deploy.redaction import is_secret, redacted
from dspark_deploy.validation import unknown_key

log = logging.getLogger(__name__)
SETTING = re.compile(r"[\w.\-\[\]]*")
ARGS = ("engine", "args")
AFTER = "after --"  # the place of a flag that stands on the command line


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """A validated profile, the file it came from, and the place of every value.

    `after` are flags on the command line behind `--`; with any, `profile` is what vLLM reads of both.
    """

    profile: Profile
    source: Path
    values: dict[str, Any]
    places: dict[Path_, Place]
    after: Flags = field(default_factory=Flags)

    @property
    def own_args(self) -> dict[str, Any]:
        """`engine.args` as the profile writes them, without the flags after `--`."""
        return (self.values.get("engine") or {}).get("args") or {}

    def where(self, *path: str | int) -> str:
        """The place of the value at `path`, or of the nearest section above it."""
        if path[:2] == ARGS and len(path) > 2 and path[2] in self.after.args:
            return AFTER
        return str(_place(self.places, path, self.source.name))

    def with_flags(self, parts: Sequence[str]) -> LoadedProfile:
        """This launch as vLLM reads it with `parts` after `--`: what every rule looks at.

        Keys of JSON flags behind a dot become the flag that they are of. The result is not validated anew.
        """
        after = parse_flags(parts)
        places = dict(self.places)
        for name in self.own_args:
            flag, dot, _ = name.partition(".")
            if dot:
                places.setdefault((*ARGS, flag), _place(self.places, (*ARGS, name), self.source.name))
        return replace(self, profile=as_vllm_reads(self.profile, after), places=places, after=after)

    def revised(self, changes: dict[str, Any]) -> LoadedProfile:
        """A copy with the values at dotted paths replaced, validated anew. Raises ValidationError."""
        document = Document(copy.deepcopy(self.values), dict(self.places))
        for name, value in changes.items():
            _assign(document.values, name.split("."), value)
        profile = Profile.model_validate(document.values)
        return LoadedProfile(profile, self.source, document.values, document.places)


def load_profile(
    source: str | Path, sets: Sequence[str] = (), given: Mapping[str, Any] | None = None
) -> LoadedProfile:
    """Load and validate. `sets` are `path=value` strings, `given` values by dotted path from flags.

    Raises InputError with every fault.
    """
    path = find_profile(source)
    document = _with_parents(path, ())
    for assignment in sets:
        _apply_set(document, assignment)
    for name, value in (given or {}).items():
        _assign(document.values, name.split("."), value)
        document.places[tuple(name.split("."))] = Place("flag")
    try:
        profile = Profile.model_validate(document.values)
    except ValidationError as error:
        raise InputError(_faults(error, document, path.name)) from error
    return LoadedProfile(profile, path, document.values, document.places)


def validated(loaded: LoadedProfile, changes: dict[str, Any]) -> LoadedProfile:
    """`loaded.revised` for values that a person gave by flags. Raises InputError."""
    try:
        return loaded.revised(changes)
    except ValidationError as error:
        values = copy.deepcopy(loaded.values)
        for key, value in changes.items():
            _assign(values, key.split("."), value)
        document = Document(values, {tuple(key.split(".")): Place("flag") for key in changes})
        raise InputError(_faults(error, document, "flag")) from error


def find_profile(source: str | Path) -> Path:
    """The file for `--profile`: a path, else the shipped profile of that name. Raises InputError."""
    path = Path(source)
    if path.is_file():
        return path
    shipped = Path(str(resources.files("profiles")))
    if path.parent == Path():
        for candidate in (shipped / path.name, shipped / f"{path.name}.yaml"):
            if candidate.is_file():
                log.info("profile %s: no such file here, taking the one shipped with dspark-deploy", path)
                return candidate
    known = sorted(p.name for p in shipped.glob("*.yaml"))
    raise InputError(f"{source}: no such profile. Give a file, or one of those shipped: {', '.join(known)}")


def _with_parents(path: Path, chain: tuple[Path, ...]) -> Document:
    if path.resolve() in chain:
        raise InputError(f"{path.name}: 'extends' comes back to a file it started from; break the circle")
    document = read_document(path)
    parent = document.values.pop("extends", None)
    if parent is None:
        return document
    where = document.places[("extends",)]
    if not isinstance(parent, str):
        raise InputError(f"{where}: extends: must be the name of one profile, got {parent!r}")
    beside = path.parent / parent
    try:
        found = beside if beside.is_file() else find_profile(parent)
    except InputError as error:
        raise InputError(f"{where}: extends: {error}") from error
    base = _with_parents(found, (*chain, path.resolve()))
    _merge(base.values, document.values)
    return Document(base.values, {**base.places, **document.places})


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Mappings merge key by key; anything else, lists included, is replaced."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _apply_set(document: Document, assignment: str) -> None:
    name, equals, text = assignment.partition("=")
    keys = name.strip().split(".")
    # Whatever follows the path may be a secret, so no message holds it.
    shown = f"--set {SETTING.match(assignment)[0]}"  # type: ignore[index]  # it matches nothing as well
    if not equals or not all(keys):
        raise InputError(f"{shown}: write path=value, as in speculative.num_speculative_tokens=3")
    try:
        value = parse_document(f"value: {text}", shown).values["value"]
    except InputError as error:
        raise InputError(f"{shown}: the value is not YAML, or has a tag or an anchor; quote it") from error
    _assign(document.values, keys, value)
    document.places[tuple(keys)] = Place(f"--set {name.strip()}")


def _assign(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[keys[-1]] = value


def _place(places: dict[Path_, Place], path: tuple[str | int, ...], default: str) -> Place:
    for length in range(len(path), 0, -1):
        if path[:length] in places:
            return places[path[:length]]
    return Place(default)


def _faults(error: ValidationError, document: Document, name: str) -> list[str]:
    lines: dict[tuple[str | int, ...], str] = {}
    for fault in error.errors(include_url=False):
        path = _in_document(fault["loc"], document.values)
        place = _place(document.places, path, name)
        # A union reports a fault per branch; the first says what is wrong as well as all of them.
        if not any(path[:length] in lines for length in range(1, len(path) + 1)):
            lines[path] = f"{place}: {dotted(path)}: {_explain(fault, path)}"
    return list(lines.values())


def _in_document(loc: tuple[str | int, ...], values: Any) -> tuple[str | int, ...]:
    """Drop the parts of a pydantic location that name a union's branch and not a key."""
    path: list[str | int] = []
    for i, part in enumerate(loc):
        if _holds(values, part):
            values = values[part]
        elif i < len(loc) - 1 or not isinstance(values, dict):
            continue
        path.append(part)
    return tuple(path)


def _holds(values: Any, part: str | int) -> bool:
    if isinstance(values, dict):
        return part in values
    return isinstance(values, list) and isinstance(part, int) and part < len(values)


def _explain(fault: Any, path: tuple[str | int, ...]) -> str:
    kind, message = fault["type"], fault["msg"]
    if kind == "missing":
        return "is required and missing"
    if kind == "extra_forbidden":
        return unknown_key(str(path[-1]), _keys(path[:-1]))
    if kind == "union_tag_not_found":
        return f"{fault['ctx']['discriminator']} is required and missing, got {_shown(fault['input'])}"
    message = message.removeprefix("Value error, ")
    if path[:2] == ("engine", "env") or any(is_secret(str(part)) for part in path):
        return message
    return f"{message}, got {_shown(fault['input'])}"


def _shown(value: Any) -> str:
    text = repr(redacted(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _keys(path: tuple[str | int, ...]) -> list[str]:
    """The keys that the schema knows at `path`."""
    models: list[type[BaseModel]] = [Profile]
    for part in path:
        if isinstance(part, str):
            models = [
                found
                for model in models
                if part in model.model_fields
                for found in _models_in(model.model_fields[part].annotation)
            ]
    return sorted({key for model in models for key in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
