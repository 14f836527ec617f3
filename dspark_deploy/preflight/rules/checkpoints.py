"""Target and draft on disk: there, whole, and of the family that the profile says."""

from __future__ import annotations

from dspark_deploy.preflight.checkpoint import BUILTIN
from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule
from dspark_deploy.profile import LoadedProfile


@rule("CHECKPOINT_MISSING", "DRAFT_MISSING", "BUILTIN_DAMAGED")
def checkpoints_usable(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Target and draft are there and whole."""
    for code, checkpoint, path in (
        ("CHECKPOINT_MISSING", facts.model, ("model", "path")),
        ("DRAFT_MISSING", facts.draft, ("speculative", "draft")),
    ):
        if checkpoint is None or not checkpoint.problem:
            continue
        if checkpoint.name.startswith(BUILTIN) and checkpoint.folder:
            yield error(
                "BUILTIN_DAMAGED",
                checkpoint.problem,
                "install the package again: its own checkpoint is not as it was shipped",
                loaded.where(*path),
            )
        else:
            yield error(
                code,
                checkpoint.problem,
                f"give a folder with config.json and weights, as --set {'.'.join(path)}=/path",
                loaded.where(*path),
            )


@rule("FAMILY_DIFFERS")
def family_is_as_stated(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A profile made for one model, and a checkpoint of another: its settings would be guesses."""
    stated = loaded.profile.model.family
    found = facts.model.config.get("model_type") if facts.model else None
    if stated and found and stated != found:
        yield error(
            "FAMILY_DIFFERS",
            f"the profile is for {stated}, and config.json of {loaded.profile.model.path} says {found}",
            f"use a profile for {found}",
            loaded.where("model", "family"),
        )
