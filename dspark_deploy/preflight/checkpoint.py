"""A checkpoint as the preflight sees it: where it is, whether it is whole, and what config.json says."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dspark_deploy.errors import InputError
from dspark_deploy.plain_json import parse_json
from dspark_deploy.tiny import checkpoint as builtin

BUILTIN = "builtin:"
HEADER_LIMIT = 100_000_000  # the format's own
# Configuration, tokenizer, index and templates; weights; code.
READ = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".safetensors", ".bin", ".pt", ".py"}
HOME_HINT = " (~ is not expanded in a profile; write the whole path)"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`folder` is empty for a name on the hub, which is not looked at; `problem` says what is wrong.

    `weight_bytes` is the size of the safetensors files, and `draft_tensors` the number of tensors below
    `mtp.`, as their headers and index name them.
    """

    name: str
    folder: str = ""
    problem: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    weight_bytes: Annotated[int, Field(ge=0)] = 0
    draft_tensors: Annotated[int, Field(ge=0)] = 0

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
        folder = Path(resolve(name))
        if name.startswith(BUILTIN) and (damage := builtin.damage(name.removeprefix(BUILTIN))):
            return Checkpoint(name, str(folder), "\n".join(damage))
        exists = folder.exists()
    except (InputError, OSError, ValueError) as error:
        return Checkpoint(name, problem=str(error))
    if not exists:
        # `org/name` is a name on the hub; anything that looks like a path was meant as one.
        looks_like_path = name.startswith(("/", "./", "../", "~")) or name.count("/") != 1
        hint = HOME_HINT if name.startswith("~") else ""
        return Checkpoint(name, problem=f"there is no folder {name}{hint}" if looks_like_path else "")
    stray = _stray(folder)
    if stray is not None:
        where_to = f"{stray} is a link to {os.path.realpath(stray)}, outside its folder"
        return Checkpoint(
            name, str(folder), f"{where_to}; put the file itself there, or give the folder that has it"
        )
    config_file = folder / "config.json"
    if config_file.exists() and not config_file.is_file():
        return Checkpoint(name, str(folder), f"{config_file} is no regular file")
    try:
        config = parse_json(config_file.read_text())
    except FileNotFoundError:
        return Checkpoint(name, str(folder), f"{folder} has no config.json")
    except (OSError, ValueError) as error:
        return Checkpoint(name, str(folder), f"{config_file} cannot be read: {error}")
    if not isinstance(config, dict):
        return Checkpoint(name, str(folder), f"{config_file} holds no JSON object")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return Checkpoint(name, str(folder), f"{folder} has no weights (*.safetensors)", config)
    odd = next((path for path in sorted(folder.glob("*.safetensors")) if not path.is_file()), None)
    if odd is not None:
        return Checkpoint(
            name, str(folder), f"{odd} is no regular file, or a link that leads nowhere", config
        )
    try:
        tensors = _tensor_names(folder)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return Checkpoint(
            name, str(folder), f"{folder}: its safetensors files cannot be read: {error}", config
        )
    if isinstance(tensors, str):
        return Checkpoint(name, str(folder), tensors, config)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    drafts = sum(tensor.removeprefix("model.").startswith("mtp.") for tensor in tensors)
    return Checkpoint(name, str(folder), "", config, weights, drafts)


def _tensor_names(folder: Path) -> list[str] | str:
    """The tensors that index or headers name, or what is wrong with the files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards: dict[str, str] = parse_json(index.read_text())["weight_map"]
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard or shard == "..":
                return f"{index} names {shard!r}, which is outside its folder"
            if not (folder / shard).is_file():
                return f"{folder} lacks {shard}, which its index names: was the download cut off?"
    # Every file is looked into, those that an index names as well: any of them may have been cut off.
    found = [name for path in sorted(folder.glob("*.safetensors")) for name in _header(path)]
    return list(shards) if index.is_file() else found


def _stray(folder: Path) -> Path | None:
    """A file that an engine reads, and that is a link out of the checkpoint."""
    return next(
        (path for path in sorted(folder.glob("*")) if path.suffix in READ and _leads_out(path)),
        None,
    )


def _leads_out(path: Path) -> bool:
    """Whether a file of a checkpoint is a link out of its folder; the hub's cache links to its own blobs."""
    folder, real = path.parent.resolve(), Path(os.path.realpath(path))  # which stands a circle of links
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    return not any(real.is_relative_to(place) for place in allowed)


def _header(path: Path) -> list[str]:
    """Names in a safetensors header: eight bytes of length, little end first, then JSON of that length.

    Raises ValueError, for a file as well that doesn't end where its last tensor does, and OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(HEADER_LIMIT, size):
            raise ValueError(f"{path.name} has no safetensors header; was the download cut off?")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} has a safetensors header that is no JSON object")
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    end = 8 + length + max((_end(path, name, tensor) for name, tensor in tensors.items()), default=0)
    if end != size:
        why = "was the download cut off?" if size < end else "was something written behind it?"
        raise ValueError(f"{path.name} has {size} bytes, where its header says {end}; {why}")
    return list(tensors)


def _end(path: Path, name: str, tensor: Any) -> int:
    """Where a tensor ends behind the header, in bytes. Raises ValueError."""
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not isinstance(offsets[1], int):
        raise ValueError(f"{path.name} has a safetensors header without data_offsets of {name}")
    return offsets[1]
