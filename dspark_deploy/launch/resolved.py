"""What was asked for against what vLLM made of it, from the sections `resolved` of the plugin's reports.

A speculative method, a k or a model that is not what was asked for is another engine: `dspark-serve` stops
it. Any other difference is shown beside what was asked, and why where that is known.

Not covered: what flags after `--` ask for, and what the report leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark_deploy.errors import EngineStartError
from dspark_deploy.launch import command as rendering
from dspark_deploy.plugin.resolved import SECTION, SPECULATIVE
from dspark_deploy.preflight import Facts, Severity
from dspark_deploy.preflight.checkpoint import resolve
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.schema import ArgValue

ANOTHER_ENGINE = (
    "model",
    "speculative",
    "speculative.method",
    "speculative.model",
    "speculative.num_speculative_tokens",
)
# `fp8` becomes the layout of it that a model's attention needs, such as `fp8_ds_mla`.
LAYOUTS = ("kv-cache-dtype",)
SAME_DTYPE = {"half": "float16", "float": "float32"}
# Field of vLLM's speculative config -> key of `speculative` where it has another name.
PROFILE_KEYS = {
    "model": "draft",
    "num_speculative_tokens_per_batch_size": "verification",
    "enable_adaptive_verification": "verification",
}
# (setting, platform or empty for all, why), where vLLM is known to change it.
REASONS = [
    ("async-scheduling", "cpu", "vLLM's CPU platform schedules without it"),
    ("cudagraph-capture-sizes", "cpu", "a CPU has no graphs to capture"),
    ("max-cudagraph-capture-size", "cpu", "a CPU has no graphs to capture"),
    ("compilation-config.cudagraph_mode", "cpu", "a CPU has no graphs to capture"),
    ("compilation-config.mode", "cpu", "vLLM's CPU platform has modes of its own"),
    ("block-size", "cpu", "the CPU's attention backends have block sizes of their own"),
    ("enable-prefix-caching", "cpu", "MLA on a CPU runs without prefix caching and chunked prefill"),
    ("enable-chunked-prefill", "cpu", "MLA on a CPU runs without prefix caching and chunked prefill"),
    ("max-num-batched-tokens", "cpu", "without chunked prefill a batch must hold the longest prompt"),
    ("data-parallel-size", "", "a model without experts runs as copies, each of which knows of itself only"),
    ("compilation-config.cudagraph_mode", "", "an attention backend or enforce-eager allows no more"),
    ("cudagraph-capture-sizes", "", "sizes above max-num-batched-tokens or max-num-seqs * (k+1) are dropped"),
    ("speculative.method", "", "vLLM reads the method from the draft's config.json where it knows better"),
    (
        "speculative.num_speculative_tokens",
        "",
        "this vLLM takes the width from the draft's own configuration",
    ),
    (
        "speculative.num_speculative_tokens_per_batch_size",
        "",
        "vLLM drops a schedule with data parallelism",
    ),
]


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting: `asked` is the profile's, at `where`; `chosen` is vLLM's. An error is another engine."""

    setting: str
    severity: Severity
    asked: Any
    chosen: Any
    why: str
    where: str

    def as_json(self) -> dict[str, Any]:
        """The difference as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.where}: {self.setting}: asked for {self.asked!r}, and vLLM runs {self.chosen!r}{why}"


def sections(reports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The section of each worker that has said what its configuration is."""
    return [report[SECTION] for report in reports if SECTION in report]


def complete(found: Sequence[dict[str, Any]]) -> bool:
    """Whether every worker of this machine has one."""
    return bool(found) and len(found) >= found[0]["workers"]


def differences(
    loaded: LoadedProfile, facts: Facts, extra: Sequence[str], reports: Iterable[dict[str, Any]]
) -> list[Difference]:
    """Where vLLM's configuration is not the profile's, errors first, each setting once."""
    found: dict[str, Difference] = {}
    loaded = loaded.with_flags(extra)
    for section in sections(reports):
        for each in _compare(loaded, facts, set(loaded.after.args), section):
            found.setdefault(each.setting, each)
    return sorted(found.values(), key=lambda each: list(Severity).index(each.severity))


def refusal(found: Sequence[Difference]) -> EngineStartError | None:
    """The error of exit code 5 for another engine than was asked for, or None."""
    wrong = [each for each in found if each.severity is Severity.ERROR]
    if not wrong:
        return None
    return EngineStartError(
        "the engine that started is another than was asked for, and was stopped\n"
        + "\n".join(f"  {each}" for each in wrong)
        + "\n  ask for what this vLLM can run, or use a build that runs what you ask for"
    )


def show(console: Console, found: Sequence[Difference]) -> None:
    """Print the differences, and nothing where there are none."""
    if not found:
        return
    table = Table(title="vLLM runs something else than was asked for", title_justify="left")
    for column in ("setting", "where", "asked", "vLLM runs", "why"):
        table.add_column(column, overflow="fold")
    for each in found:
        table.add_row(each.setting, each.where, str(each.asked), str(each.chosen), each.why)
    console.print(table)


def _compare(
    loaded: LoadedProfile, facts: Facts, over: set[str], section: dict[str, Any]
) -> list[Difference]:
    """`over` are the names after `--`; vLLM takes any unambiguous beginning of a flag's name."""
    profile = loaded.profile
    found: list[Difference] = []

    def note(setting: str, asked: Any, chosen: Any, *path: str) -> None:
        severity = Severity.ERROR if setting in ANOTHER_ENGINE else Severity.WARNING
        platform = profile.hardware.platform
        why = next((why for name, on, why in REASONS if name == setting and on in ("", platform)), "")
        found.append(Difference(setting, severity, asked, chosen, why, loaded.where(*path)))

    if not any("model".startswith(name) for name in over) and not _same_model(
        resolve(profile.model.path), section["model"]
    ):
        note("model", profile.model.path, section["model"], "model", "path")
    asked_flags = _asked_flags(loaded)
    for name, asked in asked_flags.items():
        flag = name.partition(".")[0]
        if name not in section["flags"] or any(flag.startswith(given) for given in over):
            continue
        chosen = section["flags"][name]
        if not _same(asked, chosen) and not (name in LAYOUTS and str(chosen).startswith(f"{asked}_")):
            note(name, asked, chosen, "engine", "args", *name.split("."))
    if any("speculative-config".startswith(name) for name in over):
        return found
    chosen_settings = section["speculative"]
    speculative = profile.speculative
    if speculative is None or chosen_settings is None:
        if (speculative is None) != (chosen_settings is None):
            run = chosen_settings["method"] if chosen_settings else None
            note("speculative", speculative.method if speculative else None, run, "speculative")
        return found
    config = rendering.speculative_config(speculative, facts)
    for name in SPECULATIVE:
        if name not in config or name not in chosen_settings:
            continue
        asked, chosen = config[name], chosen_settings[name]
        alike = _same_model(asked, str(chosen)) if name == "model" else _same(asked, chosen)
        if not alike:
            note(f"speculative.{name}", asked, chosen, "speculative", PROFILE_KEYS.get(name, name))
    return found


def _asked_flags(loaded: LoadedProfile) -> dict[str, ArgValue]:
    """The flags that this launch renders, those inside `compilation-config` by dotted name."""
    asked: dict[str, ArgValue] = dict(loaded.profile.engine.args)
    sizes = rendering.capture_sizes(loaded.profile)
    if sizes:
        asked["cudagraph-capture-sizes"] = list(sizes)
    inner = asked.get("compilation-config")
    if isinstance(inner, dict):
        asked |= {
            f"compilation-config.{key}": value
            for key, value in inner.items()
            if isinstance(value, bool | int | float | str)
        }
    return asked


def _same(asked: Any, chosen: Any) -> bool:
    """Whether a value came through. What is left to vLLM (`null`, `auto`) can't differ."""
    if asked is None or asked == "auto":
        return True
    if isinstance(asked, list | tuple) and isinstance(chosen, list):
        # More sizes than were asked for do no harm; one that is missing has no graph.
        return all([*each] in chosen if isinstance(each, tuple | list) else each in chosen for each in asked)
    if isinstance(asked, str) and isinstance(chosen, str):
        wanted, got = (value.casefold().replace("-", "_") for value in (asked, chosen))
        return got in (wanted, SAME_DTYPE.get(wanted))
    # A number in words, such as 128k, is for vLLM to read.
    return isinstance(asked, str) or bool(asked == chosen)


def _same_model(asked: str, chosen: str) -> bool:
    """A name on the hub can become the folder that it was downloaded to."""
    return asked == chosen or f"models--{asked.replace('/', '--')}" in chosen
