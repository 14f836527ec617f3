"""One engine: vLLM's OpenAI server for a profile, from its start through readiness to its end.

    with Engine.start(loaded, facts, run, extra=[]) as engine:
        report = engine.wait_ready(on_line=print)
        ...

Readiness is `/health`; on a node without an API server, that its workers have loaded. An engine that exits
before that, or is not ready in time, raises EngineStartError with the lines of its log that say why.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
import yaml

from dspark_deploy.errors import EngineDiedError, EngineStartError, FileError, Interrupted
from dspark_deploy.launch import command as rendering
from dspark_deploy.launch import numerics, resolved
from dspark_deploy.launch.log import LogFollower, meaningful_lines
from dspark_deploy.launch.nodes import is_headless
from dspark_deploy.launch.rundir import RunDirectory, write_atomically
from dspark_deploy.launch.supervised import Supervised
from dspark_deploy.plugin.settings import Settings
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.redaction import redacted

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """What was seen when the engine became ready. `processes` are the plugin's reports, oldest first.

    `url` is empty on a node without an API server. `differences` is where vLLM runs something else than was
    asked for.
    """

    url: str
    seconds: float
    processes: list[dict[str, Any]]
    differences: list[resolved.Difference] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "url": self.url,
            "seconds": round(self.seconds, 2),
            "differences": [each.as_json() for each in self.differences],
            "processes": self.processes,
        }


class Engine:
    """A running engine. Leaving the `with` block stops it and everything it started.

    Where a signal is why, stderr says at once how long that may take.
    """

    def __init__(
        self,
        process: Supervised,
        loaded: LoadedProfile,
        run: RunDirectory,
        port: int,
        facts: Facts,
        extra: Sequence[str] = (),
    ) -> None:
        self.loaded = loaded
        self.run = run
        self._facts = facts
        self._extra = list(extra)
        self._headless = is_headless(loaded.profile, extra)
        self.url = rendering.engine_url(loaded.profile.engine.host, port)
        self._process = process
        self._port = port
        self._stranger = False
        self._started = time.monotonic()
        self._follower = LogFollower(run.log)

    @classmethod
    def start(cls, loaded: LoadedProfile, facts: Facts, run: RunDirectory, extra: list[str]) -> Engine:
        """Write the run directory and start the server. Returns at once; see `wait_ready`.

        Raises FileError where the run directory takes no files.
        """
        try:
            return cls._start(loaded, facts, run, extra)
        except OSError as error:
            raise FileError(f"{error.filename or run.path}: cannot be written: {error.strerror}") from error

    @classmethod
    def _start(cls, loaded: LoadedProfile, facts: Facts, run: RunDirectory, extra: list[str]) -> Engine:
        profile = loaded.profile
        port = profile.engine.port or free_port(profile.engine.host)
        command = rendering.serve_command(profile, facts, port, extra)
        env = rendering.engine_environment(profile, run.settings.resolve(), os.environ)
        run.processes.mkdir(exist_ok=True)
        Settings(
            platform=profile.hardware.platform,
            report_dir=run.processes.resolve(),
            cpu_twins=profile.engine.cpu_twins,
            mhc_provider=profile.mhc.provider,
            mhc_gate=profile.mhc.gate,
            jit_guard=profile.jit.guard,
        ).write(run.settings)
        resolved = redacted(profile.model_dump(mode="json"))
        write_atomically(run.path / "profile.yaml", yaml.safe_dump(resolved, sort_keys=False), private=True)
        run.write_json(
            "command.json",
            {
                "command": rendering.redacted_command(command),
                "environment": rendering.added_environment(profile, env),
                "facts": facts.as_json(),
            },
            private=True,
        )
        process = Supervised(command, env, run.log, grace_s=profile.engine.stop_timeout_s)
        return cls(process, loaded, run, port, facts, extra)

    def wait_ready(self, on_line: Callable[[str], None] | None = None) -> ReadyReport:
        """Wait for `/health`, or without an API server for the workers. `on_line` gets the log's lines.

        Raises EngineStartError, for another engine than was asked for as well, and NumericsRefused.
        """
        with httpx.Client(timeout=2) as client:
            while True:
                self.follow(on_line)
                code = self._process.poll()
                seconds = time.monotonic() - self._started
                self._check_start(code, seconds)
                if self._joined() if self._headless else self._healthy(client):
                    self.follow(on_line)
                    return self._ready(seconds)
                time.sleep(POLL_S)

    def _ready(self, seconds: float) -> ReadyReport:
        reports = process_reports(self.run.processes)
        found = resolved.differences(self.loaded, self._facts, self._extra, reports)
        refused = resolved.refusal(found)
        if refused is not None:
            raise refused
        return ReadyReport("" if self._headless else self.url, seconds, reports, found)

    def _joined(self) -> bool:
        """Whether every worker of this node has its model and its KV cache; the head starts them together."""
        return resolved.complete(resolved.sections(process_reports(self.run.processes)))

    def wait_numerics(self, on_line: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
        """Wait until every worker's gate has spoken, and return what it said; the engine isn't ready then.

        Raises EngineStartError where the engine ends before, or takes too long.
        """
        while True:
            self.follow(on_line)
            code = self._process.poll()
            found = numerics.sections(process_reports(self.run.processes))
            if numerics.complete(found):
                return found
            self._check_start(code, time.monotonic() - self._started)
            time.sleep(POLL_S)

    def _check_start(self, code: int | None, seconds: float) -> None:
        """Raise for an engine that has ended or has had its time; NumericsRefused where the gate ended it."""
        limit = self.loaded.profile.engine.ready_timeout_s
        if code is not None:
            refused = numerics.refusal(numerics.sections(process_reports(self.run.processes)))
            if refused is not None:
                raise refused
            raise EngineStartError(
                f"the engine exited with code {code} after {seconds:.0f} s, before it was ready{self._taken}",
                meaningful_lines(self.run.log),
            )
        if seconds > limit:
            raise EngineStartError(
                f"the engine was not ready within {limit} s (engine.ready_timeout_s){self._taken}",
                meaningful_lines(self.run.log),
            )

    @property
    def _taken(self) -> str:
        return f"; another process answers at {self.url}" if self._stranger else ""

    def _healthy(self, client: httpx.Client) -> bool:
        """Whether our engine says so: the port may have been taken between the preflight and its start."""
        try:
            healthy = client.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False
        self._stranger = healthy and not listens(self._process.pid, self._port)
        return healthy and not self._stranger

    def follow(self, on_line: Callable[[str], None] | None) -> None:
        """Hand the log's new lines to `on_line`."""
        lines = self._follower.new_lines()
        if on_line is not None:
            for line in lines:
                on_line(line)

    def check_alive(self) -> None:
        """Raises EngineDiedError if the engine has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineDiedError(
                f"the engine exited with code {code} after it had been ready", meaningful_lines(self.run.log)
            )

    def stop(self) -> int:
        """Stop the engine and everything it started; returns its exit code."""
        return self._process.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, Interrupted):
            # Not by logging: a view on a terminal makes room for what is written to sys.stderr as it is now.
            sys.stderr.write(
                f"stopping the engine: it has up to {self.loaded.profile.engine.stop_timeout_s} s "
                f"(engine.stop_timeout_s), then it is killed; a second Ctrl-C ends this command at once, and "
                f"the engine is stopped all the same\n"
            )
            sys.stderr.flush()
        self.stop()


def listens(pid: int, port: int) -> bool:
    """Whether a process, or one below it, listens on a port."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return False
    for process in family:
        try:
            found = process.net_connections("tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found):
            return True
    return False


def free_port(host: str) -> int:
    """A port that is free at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def process_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports that the plugin's processes have left, oldest first."""
    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text()) for path in found]
