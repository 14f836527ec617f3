"""A sweep's study, found or begun: the storage, the name, and the refusal of what does not belong to it.

The name is `dspark-sweep-PROFILE-HASH`, the hash being of the identity. Where a storage holds a study of the
same profile by another hash, something changed, and the sweep is refused unless it says with `--seed-from`
that it begins anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from dspark_deploy.errors import InputError
from tuning import identity as identities
from tuning.samplers import GRID, SAMPLED_TRIALS, choose
from tuning.space import Space, fingerprint
from tuning.storage import StorageErrors, naming_a_damaged_storage, open_storage, shown, study_names, unusable
from tuning.study import Study, Violation
from tuning.trials import COMPLETE, complete_trials, existing_study, open_study, stored_identity
from tuning.workers import worker_name

PREFIX = "dspark-sweep"
OWN = "study.db"


@dataclass(frozen=True, slots=True)
class Options:
    """How a sweep is run, beside what its profile says. `command` is the command line, for what to type.

    `seed_from` is the folder of an earlier sweep, or the name of a study in the same storage.
    """

    storage: str | None = None
    seed_from: str | None = None
    retry_failed: bool = False
    gpus: tuple[int, ...] = ()
    command: tuple[str, ...] = ("dspark-tune", "sweep")


@dataclass(frozen=True, slots=True)
class Opened:
    """A study that may be used.

    `why` says why its sampler was taken, `seeded` how many trials it was given, if a source was named.
    """

    study: Study
    storage: BaseStorage
    url: str
    name: str
    why: str
    seeded: int | None

    def lines(self, folder: Path) -> list[str]:
        """What is about to be searched, for people: how much, by what sampler, and what is never booted."""
        space, study = self.study.space, self.study
        ended = [outcome for cell, outcome in study.outcomes().items() if cell in space.cells]
        measured = sum(outcome.state == COMPLETE for outcome in ended)
        failed = f", {len(ended) - measured} failed" if len(ended) > measured else ""
        found = [
            f"{len(space.cells)} configurations, {measured} of them measured already{failed}; "
            f"folder {folder}",
            f"sampler {study.sampler}: {self.why}; study {self.name}",
        ]
        for cell, refused in space.infeasible.items():
            found.append(f"{cell.label}: infeasible, never booted: {', '.join(refused.codes)}")
        for cell, other in space.same.items():
            found.append(f"{cell.label}: the same engine as {other.label}, measured once")
        if self.seeded is not None:
            why = "" if self.seeded else ": engine, workload or configurations differ"
            found.append(f"{self.seeded} measurements taken over by --seed-from{why}")
        return found


def open_sweep(
    folder: Path,
    profile: str,
    identity: dict[str, Any],
    space: Space,
    options: Options,
    *,
    sampler: str,
    trials: int | None,
    violation_of: Violation,
) -> Opened:
    """Open or create the study. Raises InputError where it belongs to something else, before any boot."""
    url = options.storage or f"sqlite:///{folder.resolve() / OWN}"
    storage = open_storage(url)
    name = f"{PREFIX}-{profile}-{fingerprint(identity)}"
    chosen, why = choose(sampler, len(space.cells))
    try:
        with naming_a_damaged_storage(url):
            names = study_names(storage)
        earlier = [
            each for each in names if re.fullmatch(rf"{PREFIX}-{re.escape(profile)}-[0-9a-f]{{12}}", each)
        ]
        if name not in names and earlier and options.seed_from is None:
            raise _refusal(folder, storage, earlier[-1], identity, space, options)
        if not names and options.storage is None:
            _refuse_lost_results(folder)
        with naming_a_damaged_storage(url):
            found = open_study(storage, name, identity, chosen)
        study = Study(
            found,
            space,
            worker_name(),
            chosen,
            trials or (None if chosen == GRID else SAMPLED_TRIALS),
            options.retry_failed,
            alone=options.storage is None,
        )
        seeded = None if options.seed_from is None else 0
        if options.seed_from is not None:
            source = _source(options.seed_from, url, storage)
            if identities.comparable(stored_identity(source), identity):
                seeded = study.take_over(source, violation_of)
    except StorageErrors as error:
        raise unusable(url, error) from error
    return Opened(study, storage, url, name, why, seeded)


def _refuse_lost_results(folder: Path) -> None:
    """Raises InputError where the folder holds results of a study that isn't there any more."""
    left = [folder / "result.json", *sorted(folder.glob("cells/*/ready.json"))]
    found = [file.relative_to(folder) for file in left if file.exists()]
    if found:
        raise InputError(
            f"{folder}: {OWN} is empty, and the folder holds results: {found[0]}"
            + (f" and {len(found) - 1} more" if len(found) > 1 else "")
            + f"; put {OWN} back, name the storage they are in by --storage, or begin anew with another --out"
        )


def _source(seed_from: str, url: str, storage: BaseStorage) -> optuna.Study:
    """The study to take trials from: of a folder, or by its name in the same storage."""
    file = Path(seed_from) / OWN
    if file.is_file():
        url = f"sqlite:///{file.resolve()}"
        storage = open_storage(url)
        with naming_a_damaged_storage(url):
            names = [name for name in study_names(storage) if name.startswith(f"{PREFIX}-")]
        # Studies beside the search are named after it.
        own = [name for name in names if re.fullmatch(rf"{PREFIX}-.+-[0-9a-f]{{12}}", name)]
        seed_from = own[-1] if own else seed_from
    with naming_a_damaged_storage(url):
        if seed_from in study_names(storage):
            return existing_study(storage, seed_from)
    raise InputError(f"--seed-from {seed_from}: neither a sweep's folder nor a study in this storage")


def _refusal(
    folder: Path,
    storage: BaseStorage,
    name: str,
    identity: dict[str, Any],
    space: Space,
    options: Options,
) -> InputError:
    with naming_a_damaged_storage(options.storage or str(folder)):
        study = existing_study(storage, name)
    found = complete_trials(study)
    source = str(folder) if options.storage is None else name
    return identities.refuse(
        stored_identity(study),
        identity,
        place=str(folder) if options.storage is None else f"{shown(options.storage)}, study {name}",
        command=_anew(options.command, f"{folder}-{fingerprint(identity)[:6]}", source),
        fitting=sum(configuration in space.cells for configuration in found),
        measured=len(found),
    )


def _anew(command: Sequence[str], out: str, source: str) -> list[str]:
    """The same command line with another folder and a source of trials."""
    kept: list[str] = []
    skip = False
    for word in command:
        if skip or word in ("--out", "--seed-from"):
            skip = not skip
            continue
        if not word.startswith(("--out=", "--seed-from=")):
            kept.append(word)
    return [*kept, "--out", out, "--seed-from", source]
