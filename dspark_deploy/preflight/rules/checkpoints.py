"""Target and draft on disk: there, whole, and of the family that the profile says."""

from __future__ import annotations

from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule
from dspark_deploy.profile import LoadedProfile


@rule("CHECKPOINT_MISSING", "DRAFT_MISSING")
def checkpoints_usable(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Target and draft are there and whole."""
    for code, checkpoint, path in (
        ("CHECKPOINT_MISSING", facts.model, ("model", "path")),
        ("DRAFT_MISSING", facts.draft, ("speculative", "draft")),
    ):
        if checkpoint is not None and checkpoint.problem:
            yield error(
                code,
                checkpoint.problem,
                f"give a folder with config.json and weights, as --set {'.'.join(path)}=/path",
                loaded.where(*path),
            )
