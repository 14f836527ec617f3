"""The wheel: the same bytes wherever and whenever it is built, and what is in it.

Built by `make wheel` from what git knows of this tree, changes that are not committed included; skipped where
this is no git checkout.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = {
    "console_scripts": {
        "dspark-serve": "dspark_deploy.beginning:serve",
        "dspark-tune": "tuning.beginning:tune",
    },
    "vllm.platform_plugins": {"dspark_deploy": "dspark_deploy.plugin:platform_hook"},
    "vllm.general_plugins": {"dspark_deploy": "dspark_deploy.plugin:general_hook"},
}


def git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def build(root: Path, dist: Path, umask: int, reference: str) -> Path:
    """One `make wheel`; the environment that holds setuptools is the one that runs the tests."""
    command = ["make", "-s", "wheel", f"BIN={Path(sys.executable).parent}", "READY=", f"DIST={dist}"]
    done = subprocess.run(
        [*command, f"REF={reference}"], cwd=root, umask=umask, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def reference() -> str:
    """The commit that is built: one for all tests, since a commit of changes has the time of its making."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None or shutil.which("make") is None:
        pytest.skip("make wheel needs git, make and a git checkout")
    return git("stash", "create") or "HEAD"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, reference: str) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"), 0o022, reference)


@pytest.fixture(scope="module")
def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_it_is_the_same_from_another_folder_umask_and_time(
    wheel: Path, reference: str, tmp_path: Path
) -> None:
    clone = tmp_path / "some" / "other" / "place"
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(clone)], check=True, umask=0o077)
    git("checkout", "-q", reference, root=clone)
    for path in clone.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            os.utime(path, (time.time() - 1e6,) * 2)
    (clone / "build" / "lib" / "dspark_deploy").mkdir(parents=True)
    (clone / "build" / "lib" / "dspark_deploy" / "left_over.py").write_text("")  # of an earlier build
    time.sleep(2.1)  # a zip's times are even seconds
    again = build(clone, tmp_path / "dist", 0o077, "HEAD")
    digests = [hashlib.sha256(each.read_bytes()).hexdigest() for each in (wheel, again)]
    assert digests[0] == digests[1]


def test_what_is_in_it(members: dict[str, bytes]) -> None:
    tracked = git("ls-files", "dspark_deploy", "tuning", "profiles").splitlines()
    wanted = {name for name in tracked if Path(name).suffix in (".py", ".yaml", ".j2", ".typed", ".json")}
    wanted |= {name for name in tracked if name.startswith("dspark_deploy/tiny/weights/")}
    information = {name for name in members if ".dist-info/" in name}
    assert members.keys() - information == wanted
    assert any(name.endswith("LICENSE") for name in information)


def test_its_entry_points(members: dict[str, bytes]) -> None:
    (name,) = (name for name in members if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(members[name].decode())
    assert {section: dict(parser[section]) for section in parser.sections()} == ENTRY_POINTS


def test_it_says_nothing_of_where_it_was_built(members: dict[str, bytes], wheel: Path) -> None:
    places = {str(ROOT), str(Path.home()), str(wheel.parent), sys.prefix, "/tmp/tmp"} - {"/"}
    host = re.compile(rb"\b" + re.escape(platform.node().encode()) + rb"\b")
    for name, data in members.items():
        assert not [place for place in places if place.encode() in data], name
        # What is made by the build; a short name may be a word of the sources.
        assert ".dist-info/" not in name or not host.search(data), name


def test_modes_do_not_depend_on_the_builder(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {each.external_attr >> 16 & 0o777 for each in archive.infolist()} <= {0o644, 0o664}
