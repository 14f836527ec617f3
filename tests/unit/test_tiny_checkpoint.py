"""The shipped checkpoint is whole, a damaged copy is refused, and what it claims about itself holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark_deploy.errors import InputError
from dspark_deploy.tiny.checkpoint import (
    MANIFEST,
    builtin_names,
    checkpoint_path,
    verify,
    verify_folder,
    write_manifest,
)

PAIR = ["tiny-qwen3/draft", "tiny-qwen3/target"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_path("tiny-qwen3/target").parent, tmp_path / "pair"))


def test_both_parts_are_built_in_and_whole() -> None:
    assert set(PAIR) <= set(builtin_names())
    for name in PAIR:
        path = verify(name)
        assert path == checkpoint_path(name)
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            file.name for file in path.iterdir()
        }


def test_losses_are_whole_too_and_the_pair_is_small() -> None:
    root = checkpoint_path(PAIR[0]).parent
    verify_folder(root)
    files = json.loads((root / MANIFEST).read_text())["files"]
    assert "losses.json" in files
    assert sum(facts["bytes"] for facts in files.values()) < 1_200_000


@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-qwen3/", "../tiny", "tiny-qwen3/target/..", "", "tiny-qwen/target"]
)
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError, match="tiny-qwen3/draft, tiny-qwen3/target"):
        checkpoint_path(name)


def _flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _cut_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _add_another(path: Path) -> None:
    path.with_name("extra.safetensors").touch()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (_flip_last_byte, "SHA-256"),
    "cut": (_cut_last_byte, r"\d+ bytes, where MANIFEST.json says \d+"),
    "gone": (Path.unlink, "missing"),
    "added": (_add_another, "extra.safetensors: not in MANIFEST.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_and_named(copy: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    verify_folder(copy)
    damage(copy / "draft" / "model.safetensors")
    verify_folder(copy, "target")
    for part in ("draft", ""):
        with pytest.raises(InputError, match=message) as caught:
            verify_folder(copy, part)
        assert len(caught.value.faults) == 2
        assert str(copy / "draft") in caught.value.faults[0]


def test_every_fault_is_reported_at_once(copy: Path) -> None:
    (copy / "target" / "config.json").unlink()
    _flip_last_byte(copy / "draft" / "config.json")
    with pytest.raises(InputError) as caught:
        verify_folder(copy)
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not a manifest"),
        ("[]", "not a manifest"),
        ("{}", "not a manifest"),
        ('{"format": 1, "files": {"x": {"bytes": 1}}}', "not a manifest"),
        ('{"format": 2}', "format 2"),
    ],
)
def test_unusable_manifests_are_refused(copy: Path, text: str | None, message: str) -> None:
    (copy / MANIFEST).unlink()
    if text is not None:
        (copy / MANIFEST).write_text(text)
    with pytest.raises(InputError, match=message):
        verify_folder(copy)


def test_a_part_that_the_manifest_does_not_know_is_refused(copy: Path) -> None:
    with pytest.raises(InputError, match="lists no files under drafts"):
        verify_folder(copy, "drafts")


def test_written_manifest_verifies_and_keeps_its_facts(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "file").write_bytes(b"abc")
    write_manifest(tmp_path, {"name": "x"})
    verify_folder(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["name"] == "x"
    assert manifest["files"]["part/file"] == {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
