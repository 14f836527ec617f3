"""The search space: which engine configurations a sweep measures, and what each changes in the profile.

A space is conditional: without speculation, nothing about drafts is chosen. It is constrained: what the
preflight refuses is cut before any boot, with the codes of its findings. And two points that come to the
same engine are one: the first is measured, the other points at it.

Not covered: settings that are no choice from a list.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from dspark_deploy.errors import InputError
from dspark_deploy.preflight import Facts, Severity, check
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.schema import Schedule, SpaceSettings

Choice = str | int
K = "num_speculative_tokens"
VERIFICATION = "verification"
# Marks of what is measured beside the search: a boot of a finalist, a run that predicts, one for answers.
BOOT, PROBE, ANSWERS = "boot", "probe", "answers"
MARKS = (BOOT, PROBE, ANSWERS)
SCHEDULE = "schedule"  # a derived one, as long as nobody knows its rows
RENDERED, ALL = "rendered", "all"
MOST_POINTS = 10_000
# Codes of ours beside the preflight's.
NOT_FOR_THIS_K, NO_PROFILE = "SCHEDULE_NOT_FOR_THIS_K", "NOT_A_PROFILE"
CAPTURE, LARGEST = "engine.args.cudagraph-capture-sizes", "engine.args.max-cudagraph-capture-size"


@dataclass(frozen=True, slots=True)
class Dimension:
    """One setting of a space. `short` is its beginning in labels; `of_draft` ones need speculation."""

    name: str
    path: str
    short: str = ""
    of_draft: bool = False


DIMENSIONS = (
    Dimension("draft_sample_method", "speculative.draft_sample_method", "", True),
    Dimension(VERIFICATION, "speculative.verification", "", True),
    Dimension("rejection_sample_method", "speculative.rejection_sample_method", "", True),
    Dimension("dspark_draft_topk", "speculative.dspark_draft_topk", "topk", True),
    Dimension("capture_sizes", CAPTURE, "capture"),
    Dimension("max_num_seqs", "engine.args.max-num-seqs", "seqs"),
    Dimension("max_num_batched_tokens", "engine.args.max-num-batched-tokens", "batched"),
    Dimension("mhc_provider", "mhc.provider", "mhc"),
)
OTHERS = DIMENSIONS[1:]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One engine configuration. Without speculation, k is 0 and the draft has no sampling method.

    `others` are the further settings of the space, by name, in the order of `DIMENSIONS`.
    """

    num_speculative_tokens: int
    draft_sample_method: str | None = None
    others: tuple[tuple[str, Choice], ...] = ()

    @property
    def label(self) -> str:
        """Short and unique: `none`, `k5-greedy`, `k5-greedy-seqs16`. Also the name of its files."""
        k = self.num_speculative_tokens
        parts = [f"k{k}", str(self.draft_sample_method)] if k else ["none"]
        shorts = {each.name: each.short for each in OTHERS} | {mark: mark for mark in MARKS}
        return "-".join(parts + [shorts[name] + _word(name, value) for name, value in self.others])

    def other(self, name: str) -> Choice | None:
        """A further setting, or None where the space leaves it to the profile."""
        return dict(self.others).get(name)

    def having(self, name: str, value: Choice) -> Configuration:
        """The same with one further setting."""
        return from_params(self.params() | {name: value})

    @property
    def unmarked(self) -> Configuration:
        """The configuration itself, of which this is one boot, one run that predicts, or one for answers."""
        kept = tuple((name, value) for name, value in self.others if name not in MARKS)
        return Configuration(self.num_speculative_tokens, self.draft_sample_method, kept)

    def apply(self, loaded: LoadedProfile) -> LoadedProfile:
        """The profile with this configuration in it, on a free port. Raises pydantic's ValidationError."""
        return loaded.revised({**self.changes(), "engine.port": 0})

    def changes(self) -> dict[str, Any]:
        """What differs from the profile, by dotted path."""
        found: dict[str, Any] = {"speculative": None}
        if self.num_speculative_tokens:
            found = {
                f"speculative.{K}": self.num_speculative_tokens,
                "speculative.draft_sample_method": self.draft_sample_method,
            }
        paths = {each.name: each.path for each in OTHERS}
        for name, value in self.others:
            if name == "capture_sizes":
                found |= _capture(value)
            elif name not in MARKS:
                found[paths[name]] = _in_profile(name, value)
        return found

    def params(self) -> dict[str, Choice]:
        """The configuration by the names of the space: optuna's parameters."""
        found: dict[str, Choice] = {K: self.num_speculative_tokens}
        if self.draft_sample_method is not None:
            found["draft_sample_method"] = self.draft_sample_method
        return found | dict(self.others)


REFERENCE = Configuration(0)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why a point is never booted: codes of findings, and their messages."""

    codes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Space:
    """A space, cut. `choices` are every value of every setting, 0 being no speculation.

    `cells` are to be measured, no speculation first; `infeasible` and `same` are not: a point of `same` is
    the engine of the cell that it points at.
    """

    cells: list[Configuration]
    choices: dict[str, list[Choice]] = field(default_factory=dict)
    infeasible: dict[Configuration, Infeasible] = field(default_factory=dict)
    same: dict[Configuration, Configuration] = field(default_factory=dict)

    @property
    def derives_schedule(self) -> bool:
        """Whether a schedule by batch size is to be made from what the fixed configurations measured."""
        return SCHEDULE in self.choices.get(VERIFICATION, [])


def from_params(params: Mapping[str, Any]) -> Configuration:
    """The configuration of optuna's parameters; what belongs to drafts is left out without speculation."""
    k = int(params[K])
    names = [each.name for each in OTHERS if each.name in params and (k or not each.of_draft)]
    names += [mark for mark in MARKS if mark in params]
    method = params.get("draft_sample_method") if k else None
    return Configuration(k, method, tuple((name, params[name]) for name in names))


def choices(space: SpaceSettings) -> dict[str, list[Choice]]:
    """The values of every setting that the space has, 0 being no speculation; largest k first.

    The largest k comes first, since its cost decides most.
    """
    numbers = sorted({k for k in space.num_speculative_tokens if isinstance(k, int)}, reverse=True)
    found: dict[str, list[Choice]] = {K: [0, *numbers]}
    for dimension in DIMENSIONS:
        values = [_choice(value) for value in getattr(space, dimension.name)]
        if values:
            found[dimension.name] = list(dict.fromkeys(values))
    return found


def configurations(space: SpaceSettings) -> list[Configuration]:
    """Every configuration, in the order of measurement. Raises InputError for a space too large to list.

    No speculation comes first whether it is in the space or not: it is what accuracy is compared with.
    """
    values = choices(space)
    size = math.prod(len(each) for each in values.values())
    if size > MOST_POINTS:
        raise InputError(
            f"sweep.space: {size} points; above {MOST_POINTS} a space is refused, since every point is held "
            f"against the preflight before the first boot. Drop values that you would not serve"
        )
    wanted = "none" in space.num_speculative_tokens
    points = (point for point in _points(values) if wanted or point.num_speculative_tokens)
    return list(dict.fromkeys([REFERENCE, *points]))


def _points(values: Mapping[str, Sequence[Choice]]) -> Iterator[Configuration]:
    for row in itertools.product(*values.values()):
        yield from_params(dict(zip(values, row, strict=True)))


def cut(space: SpaceSettings, loaded: LoadedProfile, facts: Facts) -> Space:
    """The space without what the preflight refuses and without second names for one engine."""
    cells: list[Configuration] = []
    infeasible: dict[Configuration, Infeasible] = {}
    same: dict[Configuration, Configuration] = {}
    engines: dict[str, Configuration] = {}
    for configuration in configurations(space):
        if configuration.other(VERIFICATION) == SCHEDULE:
            continue  # it is made once the fixed ones are measured
        refused, resolved = examine(configuration, loaded, facts)
        if refused is not None:
            infeasible[configuration] = refused
        elif resolved in engines:
            same[configuration] = engines[resolved]
        else:
            engines[resolved] = configuration
            cells.append(configuration)
    return Space(cells, choices(space), infeasible, same)


def examine(
    configuration: Configuration, loaded: LoadedProfile, facts: Facts
) -> tuple[Infeasible | None, str]:
    """Why a configuration can't be served, or None; and the fingerprint of the engine that it makes."""
    try:
        revised = configuration.apply(loaded)
    except ValidationError as error:
        messages = [fault["msg"].removeprefix("Value error, ") for fault in error.errors(include_url=False)]
        return Infeasible((NO_PROFILE,), "; ".join(messages)), ""
    speculative = revised.profile.speculative
    if speculative is not None and isinstance(speculative.verification, Schedule):
        highest = max(tokens for _, _, tokens in speculative.verification.per_batch_size)
        if highest < speculative.num_speculative_tokens:
            reason = f"the schedule asks for {highest} tokens at most, so drafts of more are thrown away"
            return Infeasible((NOT_FOR_THIS_K,), reason), ""
    # The port was probed for the profile as it is; a configuration takes a free one.
    errors = [
        finding
        for finding in check(revised, facts)
        if finding.severity is Severity.ERROR and finding.code != "PORT_IN_USE"
    ]
    if errors:
        codes = tuple(dict.fromkeys(finding.code for finding in errors))
        return Infeasible(codes, "; ".join(finding.message for finding in errors)), ""
    profile = revised.profile.model_dump(mode="json", include={"engine", "speculative", "mhc", "jit"})
    return None, fingerprint(profile)


def schedule_choice(rows: Sequence[Sequence[int]]) -> str:
    """A schedule `[[first, last, k], ...]` as a value of `verification`."""
    return f"{SCHEDULE}:{json.dumps([list(row) for row in rows])}"


def _choice(value: Any) -> Choice:
    """A value of the profile's `sweep.space` as a choice that optuna can store."""
    if isinstance(value, Schedule):
        return schedule_choice(value.per_batch_size)
    return value if isinstance(value, str | int) else json.dumps(value)


def _in_profile(name: str, value: Choice) -> Any:
    """A choice as the profile has it."""
    if name == VERIFICATION:
        kind, _, rows = str(value).partition(":")
        return {"kind": kind} | ({"per_batch_size": json.loads(rows)} if rows else {})
    return None if value == ALL else value


def _capture(value: Choice) -> dict[str, Any]:
    """Capture sizes: only one of vLLM's two flags is ever there, and neither where they are rendered."""
    if isinstance(value, int):
        return {CAPTURE: None, LARGEST: value}
    return {CAPTURE: None if value == RENDERED else json.loads(value), LARGEST: None}


def _word(name: str, value: Choice) -> str:
    """A choice in a label, which is also the name of a folder."""
    if name == VERIFICATION and ":" in str(value):
        rows = json.loads(str(value).partition(":")[2])
        return SCHEDULE + "".join(f"-{first}to{last}k{k}" for first, last, k in rows)
    if name == "capture_sizes" and isinstance(value, str) and value != RENDERED:
        return fingerprint(value)[:6]
    return str(value)


def fingerprint(document: Any) -> str:
    """A short hash of plain JSON values, the same for the same values in any order of keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
