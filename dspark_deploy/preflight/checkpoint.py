"""A checkpoint as the preflight sees it: where it is, whether it is whole, and what config.json says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_deploy.errors import InputError
from dspark_deploy.plain_json import parse_json
from dspark_deploy.tiny import checkpoint as builtin

BUILTIN = "builtin:"
HEADER_LIMIT = 100_000_000  # the format's own
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
    weight_bytes: int = 0
    draft_tensors: int = 0

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
            name, str(folder), f"{folder}: its safetensors index cannot be read: {error}", config
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
    stray = next((path for path in sorted(folder.glob("*.safetensors")) if _leads_out(path)), None)
    if stray is not None:
        return (
            f"{stray} is a link to {stray.resolve()}, outside its folder; put the file itself there, or give "
            f"the folder that has it"
        )
    if index.is_file():
        return list(shards)
    return [name for path in folder.glob("*.safetensors") for name in _header(path)]


def _leads_out(path: Path) -> bool:
    """Whether a file of a checkpoint is a link out of its folder; the hub's cache links to its own blobs."""
    folder, real = path.parent.resolve(), path.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    return not any(real.is_relative_to(place) for place in allowed)


def _header(path: Path) -> list[str]:
    """Names in a safetensors header: eight bytes of length, little end first, then JSON of that length.

    Raises ValueError and OSError.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(HEADER_LIMIT, path.stat().st_size):
            raise ValueError(f"{path.name} has no safetensors header; was the download cut off?")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} has a safetensors header that is no JSON object")
    return [name for name in header if name != "__metadata__"]
