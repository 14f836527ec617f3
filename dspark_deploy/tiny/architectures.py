"""The architectures that the recipe trains: how each is made, served and written.

    ARCHITECTURES["tiny-v4"].make_target(generator)

What the recipe asks of a target: `forward`, `layer_outputs` and `logits`; of a draft: `features`, `blocks`,
`logits` and `confidence`. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer

from dspark_deploy.tiny import export, model
from dspark_deploy.tiny.loop import Recipe
from dspark_deploy.tiny.v4 import export as v4_export
from dspark_deploy.tiny.v4 import model as v4_model
from dspark_deploy.tiny.v4.shape import V4DraftShape, V4Shape

AnyTarget: TypeAlias = model.Target | v4_model.Target
AnyDraft: TypeAlias = model.Draft | v4_model.Draft


@dataclass(frozen=True)
class Architecture:
    """One architecture: what the recipe needs to know of it."""

    recipe: Recipe
    target_shape: Any
    draft_shape: Any
    make_target: Callable[[torch.Generator], Any]
    make_draft: Callable[[Any, torch.Generator], Any]
    as_served: Callable[[Any], None]
    """Round a trained module to what the checkpoint holds, in place, and freeze it."""
    write: Callable[[Path, Any, Any, Tokenizer], None]
    """Write target and draft into a folder, as vLLM loads them."""

    def shapes(self) -> dict[str, Any]:
        """Both shapes, as the manifest holds them."""
        return {"target": asdict(self.target_shape), "draft": asdict(self.draft_shape)}


ARCHITECTURES = {
    "tiny-qwen3": Architecture(
        recipe=Recipe(),
        target_shape=model.TARGET_SHAPE,
        draft_shape=model.DraftShape(),
        make_target=lambda generator: model.Target(model.TARGET_SHAPE, generator),
        make_draft=lambda target, generator: model.Draft(model.DraftShape(), target, generator),
        as_served=model.round_to_bfloat16,
        write=export.write_pair,
    ),
    "tiny-v4": Architecture(
        # Dearer a step and slower to learn than the Qwen3: about an hour on two cores.
        recipe=Recipe(target_steps=3000, exactness=0.92, draft_steps=800, full_rate=0.6, threads=2),
        target_shape=V4Shape(),
        draft_shape=V4DraftShape(),
        make_target=lambda generator: v4_model.Target(V4Shape(), generator),
        make_draft=lambda target, generator: v4_model.Draft(V4DraftShape(), target, generator),
        as_served=v4_export.as_served,
        write=v4_export.write_checkpoint,
    ),
}
