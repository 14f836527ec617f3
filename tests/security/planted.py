"""Secrets that are planted at every door of the commands, and the search for them everywhere else.

Each door has a value of its own, so that what is found says where it came in. The command's own command line
is the person's affair; everything that a command starts is ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.commands import Command, Ended

WATCH_S = 0.01
PROFILE = """\
extends: cpu-tiny.yaml
name: doors
engine:
  args:
    hf-token: planted-args-hf-token
  env:
    WANDB_API_KEY: planted-env-api-key
    UPSTREAM: "http://someone:planted-env-password@proxy:3128"
    BY_QUERY: "https://proxy/?user=someone&token=planted-env-query"
    COPY: "${PLANTED}"
"""
ENVIRONMENT = {
    "HF_TOKEN": "planted-environment-hf-token",
    "OPENAI_API_KEY": "planted-environment-api-key",
    "PLANTED": "planted-environment-by-reference",
    "AWS_SECRET_ACCESS_KEY": "planted-environment-secret",
}
SETS = [
    *("--set", "engine.env.SLACK_TOKEN=planted-set"),
    "--set=engine.env.OTHER_PASSWORD=planted-set-in-one-word",
    *("--set", "engine.env.PROXY=http://someone:planted-set-password@proxy"),
]
MARKED = b"planted-"


class Watched:
    """A command with planted secrets; every process below it is watched for its title."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *arguments: str,
        profile: str = PROFILE,
        env: Mapping[str, str] = ENVIRONMENT,
        bad: dict[str, Any] | None = None,
    ) -> None:
        # Beside the folder and not in it: what the person wrote is no find.
        self.profile = folder.parent / f"{folder.name}-profile.yaml"
        self.profile.write_text(profile)
        given = ["--profile", str(self.profile)] if name == "serve" or arguments[0] != "report" else []
        words = [*arguments[:1], *given, *arguments[1:]] if name == "tune" else [*given, *arguments]
        self.command = Command(folder, name, *words, env=env, bad=bad)
        self.titles: set[tuple[str, ...]] = set()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def _watch(self) -> None:
        while self.command.process.poll() is None:
            try:
                own = psutil.Process(self.command.process.pid)
                # Between fork and exec a child still has the title of the command itself.
                titles = {tuple(child.cmdline()) for child in own.children(recursive=True)}
                self.titles |= titles - {tuple(own.cmdline())}
            except psutil.NoSuchProcess:
                continue
            time.sleep(WATCH_S)

    def end(self) -> Ended:
        """Wait for its end. Nothing planted may be in a title, in what was printed, or in a file."""
        ended = self.command.end()
        self._watching.join()
        shown = [word for title in self.titles for word in title if MARKED.decode() in word]
        found = [*(f"a process title: {word}" for word in shown), *finds(self.command.folder)]
        assert not found, found
        return ended


def finds(folder: Path) -> list[str]:
    """Where planted values lie below a folder, the printed output included."""
    found = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        at = data.find(MARKED)
        if at >= 0:
            found.append(f"{path.relative_to(folder)}: {data[max(at - 60, 0) : at + 60]!r}")
    return found
