"""A PostgreSQL server of its own for a test, in a temporary folder, gone afterwards.

The binaries are Debian's package `postgresql`; without them the test is skipped. PostgreSQL refuses to run
as root, so under root the server runs as `nobody`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.launch.engine import free_port

PASSWORD = "hunter2"
START_S = 30


def binary(name: str) -> str:
    """A program of PostgreSQL's; skips the test where there is none."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    found = str(places[-1]) if places else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed; it is in Debian's package postgresql")
    return found


@contextmanager
def postgres() -> Iterator[str]:
    """A server that is ready; gives its URL, with a password in it."""
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed: pip install 'dspark-deploy[postgres]'")
    initdb, server = binary("initdb"), binary("postgres")
    # Not below pytest's own folder, which only its user may enter.
    folder = Path(tempfile.mkdtemp(prefix="dspark-postgres-"))
    account: dict[str, Any] = {"user": "nobody"} if os.geteuid() == 0 else {}
    try:
        (folder / "password").write_text(PASSWORD)
        if account:
            for path in (folder, folder / "password"):
                shutil.chown(path, "nobody")
        data, port = folder / "data", free_port("127.0.0.1")
        made = subprocess.run(
            [
                initdb,
                "-D",
                str(data),
                "-U",
                "tuner",
                "--auth=scram-sha-256",
                f"--pwfile={folder / 'password'}",
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            **account,
        )
        assert made.returncode == 0, made.stderr
        options = ["-p", str(port), "-h", "127.0.0.1", "-k", str(folder), "-c", "fsync=off"]
        process = subprocess.Popen(
            [server, "-D", str(data), *options], cwd=folder, stderr=subprocess.PIPE, text=True, **account
        )
        try:
            url = f"postgresql://tuner:{PASSWORD}@127.0.0.1:{port}/postgres"
            _wait(url, process)
            yield url
        finally:
            process.send_signal(signal.SIGINT)  # fast shutdown: open sessions are ended
            process.communicate(timeout=START_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(url: str, process: subprocess.Popen[str]) -> None:
    import psycopg2

    deadline = time.monotonic() + START_S
    while True:
        try:
            psycopg2.connect(url).close()
            return
        except psycopg2.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(process.communicate()[1]) from None
            time.sleep(0.1)
