"""Files from outside: YAML that would build objects, and checkpoints whose index leaves their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dspark_deploy.errors import InputError
from dspark_deploy.preflight.checkpoint import read_checkpoint
from dspark_deploy.profile import load_profile
from tests.unit.profiles import TEXT, load, write

SHARD = (2).to_bytes(8, "little") + b"{}"


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system [touch {marker}]",
        "!!python/object:os.system {}",
        "!!python/name:os.system",
        "!!python/object/new:subprocess.Popen [[touch, {marker}]]",
        "!!map {a: b}",
        "!!int 5",
        "!include /etc/passwd",
        "! plain",
    ],
)
def test_a_tag_is_refused_with_its_line(tmp_path: Path, value: str) -> None:
    marker = tmp_path / "marker"
    text = TEXT + f"description:\n  {value.replace('{marker}', str(marker))}\n"
    with pytest.raises(InputError, match=rf"test\.yaml:{text.count(chr(10))}: tag .*take it out"):
        load_profile(write(tmp_path, text))
    with pytest.raises(InputError, match=r"--set description: .* has a tag"):
        load(tmp_path, sets=[f"description={value}"])
    assert not marker.exists()


def checkpoint(folder: Path, shard: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "own.safetensors").write_bytes(SHARD)
    index = {"weight_map": {"a": "own.safetensors", "b": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "{outside}",
        "..",
        ".",
        "",
        "sub/x.safetensors",
        "a\0b",
    ],
)
def test_an_index_cannot_leave_its_folder(tmp_path: Path, shard: str) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(SHARD)
    found = read_checkpoint(str(checkpoint(tmp_path / "model", shard.replace("{outside}", str(outside)))))
    assert "index" in found.problem, found


def test_a_link_cannot_leave_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(SHARD)
    folder = checkpoint(tmp_path / "model", "link.safetensors")
    (folder / "link.safetensors").symlink_to(outside)
    assert "outside its folder" in read_checkpoint(str(folder)).problem
    (folder / "model.safetensors.index.json").unlink()
    assert "outside its folder" in read_checkpoint(str(folder)).problem, "without an index as well"
    (folder / "link.safetensors").unlink()
    (folder / "link.safetensors").symlink_to("own.safetensors")
    assert read_checkpoint(str(folder)).problem == ""


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "modeling.py"]
)
def test_no_file_that_is_read_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "model", "own.safetensors")
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "s3cret"}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    found = read_checkpoint(str(folder))
    assert f"{name} is a link" in found.problem and "outside its folder" in found.problem
    assert found.config == {}, "nothing of it is read"
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    circle = read_checkpoint(str(folder)).problem
    assert circle == "" or str(folder) in circle
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert read_checkpoint(str(folder)).folder == str(folder), "a pipe is not waited for"


def test_the_hubs_cache_links_to_its_own_blobs(tmp_path: Path) -> None:
    """A snapshot in the hub's cache is made of links to blobs beside it: those, and no others."""
    repository = tmp_path / "models--org--name"
    folder = checkpoint(repository / "snapshots" / "abc", "link.safetensors")
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f00").write_bytes(SHARD)
    (folder / "link.safetensors").symlink_to("../../blobs/f00")
    for name in ("config.json", "model.safetensors.index.json"):
        (folder / name).rename(repository / "blobs" / name)
        (folder / name).symlink_to(f"../../blobs/{name}")
    assert read_checkpoint(str(folder)).problem == ""
    (folder / "link.safetensors").unlink()
    (tmp_path / "f00").write_bytes(SHARD)
    (folder / "link.safetensors").symlink_to("../../../f00")
    assert "outside its folder" in read_checkpoint(str(folder)).problem
