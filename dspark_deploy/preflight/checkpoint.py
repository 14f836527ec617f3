"""A checkpoint as the preflight sees it: where it is, whether it is whole, and what config.json says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_deploy.errors import InputError
from dspark_deploy.tiny import checkpoint as builtin

BUILTIN = "builtin:"
HOME_HINT = " (~ is not expanded in a profile; write the whole path)"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`folder` is empty for a name on the hub, which is not looked at; `problem` says what is wrong."""

    name: str
    folder: str = ""
    problem: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def trained_block(self) -> int | None:
        """The draft tokens per block that the draft was trained for, if config.json says."""
        block = self.config.get("dspark_block_size", self.config.get("block_size"))
        return block if isinstance(block, int) and not isinstance(block, bool) else None


def resolve(name: str) -> str:
    """What vLLM is given for a profile's model: a built-in checkpoint's folder, or the name as it stands."""
    if name.startswith(BUILTIN):
        return str(builtin.checkpoint_path(name.removeprefix(BUILTIN)))
    return name


def read_checkpoint(name: str) -> Checkpoint:
    """Look at one checkpoint. Never raises: what is wrong stands in `problem`."""
    try:
        if name.startswith(BUILTIN):
            builtin.verify(name.removeprefix(BUILTIN))
        folder = Path(resolve(name))
        exists = folder.exists()
    except (InputError, OSError, ValueError) as error:
        return Checkpoint(name, problem=str(error))
    if not exists:
        # `org/name` is a name on the hub; anything that looks like a path was meant as one.
        looks_like_path = name.startswith(("/", "./", "../", "~")) or name.count("/") != 1
        hint = HOME_HINT if name.startswith("~") else ""
        return Checkpoint(name, problem=f"there is no folder {name}{hint}" if looks_like_path else "")
    config_file = folder / "config.json"
    try:
        config = json.loads(config_file.read_text())
    except FileNotFoundError:
        return Checkpoint(name, str(folder), f"{folder} has no config.json")
    except (OSError, ValueError) as error:
        return Checkpoint(name, str(folder), f"{config_file} cannot be read: {error}")
    if not isinstance(config, dict):
        return Checkpoint(name, str(folder), f"{config_file} holds no JSON object")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return Checkpoint(name, str(folder), f"{folder} has no weights (*.safetensors)", config)
    return Checkpoint(name, str(folder), "", config)
