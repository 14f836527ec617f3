"""Target and draft on disk: there, whole, and of the family that the profile says."""

from __future__ import annotations

from dspark_deploy.preflight.checkpoint import BUILTIN
from dspark_deploy.preflight.facts import Facts
from dspark_deploy.preflight.rules.base import Findings, error, rule, warning
from dspark_deploy.profile import LoadedProfile

# Counts that every model has, and that rules here and vLLM compute with; largest, generously.
COUNTS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1 << 14,
    "num_attention_heads": 1 << 14,
    "max_position_embeddings": 1 << 40,
    "dspark_block_size": 1 << 10,
    "hc_mult": 1 << 10,
}


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


@rule("CONFIG_IMPOSSIBLE")
def counts_are_counts(loaded: LoadedProfile, facts: Facts) -> Findings:
    """A count in config.json that can't be: what is computed from it would say nothing."""
    for checkpoint, path in ((facts.model, ("model", "path")), (facts.draft, ("speculative", "draft"))):
        for name, largest in COUNTS.items():
            value = checkpoint.config.get(name) if checkpoint else None
            whole = isinstance(value, int) and not isinstance(value, bool)
            if checkpoint and value is not None and not (whole and 1 <= value <= largest):
                yield error(
                    "CONFIG_IMPOSSIBLE",
                    f"config.json of {checkpoint.name} has {name}: {str(value)[:40]}, where a whole number "
                    f"from 1 to {largest} belongs",
                    "get the checkpoint again, or correct its config.json",
                    loaded.where(*path),
                )


@rule("FACTS_OF_ANOTHER_MODEL")
def facts_are_of_this_model(loaded: LoadedProfile, facts: Facts) -> Findings:
    """Facts from a file hold the checkpoint that they were taken with, whatever this profile serves."""
    draft = loaded.profile.speculative.draft if loaded.profile.speculative else None
    for checkpoint, name, path in (
        (facts.model, loaded.profile.model.path, ("model", "path")),
        (facts.draft, draft, ("speculative", "draft")),
    ):
        if checkpoint and name and not checkpoint.problem and checkpoint.name.rstrip("/") != name.rstrip("/"):
            yield warning(
                "FACTS_OF_ANOTHER_MODEL",
                f"these facts are of the checkpoint {checkpoint.name}, and the profile serves {name}: what "
                "is said here of weights, block and memory is of the first",
                f"take the facts anew: dspark-serve --profile ... --set {'.'.join(path)}={name} --facts-only",
                loaded.where(*path),
            )
