"""A sweep killed by SIGKILL at random moments: what is lost, launched twice, or left behind?

    python -m bench.kill9 --kills 50 --out bench/results/kill9.json
    python -m bench.kill9 --kills 4 --seed 7
    python -m bench.kill9 --kills 12 --storage postgres --out bench/results/kill9_postgres.json
    python -m bench.kill9 --kills 12 --storage grpc --out bench/results/kill9_grpc.json

Each kill has a sweep of its own: it runs, is killed at a moment drawn evenly from the time that a whole one
takes, from its opening to its last file, and is run again to its end. The engine is a stand-in of fixed cost
that holds a real process under the guardian, as an engine's is. Then the count, all of which must be 0:

    lost         configurations complete in the storage when it was killed, and not in the final result, or
                 under another trial
    duplicates   configurations launched again after they were complete
    orphans      processes of the killed sweep that are there ten seconds later
    broken       files that can't be read after the kill, or partial ones left after the second run

and `launched_more` is at most 1 a kill: the one that ran. The storage is the sweep's own SQLite file, a
database of its own on one PostgreSQL server, or optuna's gRPC proxy before such a database; what is in it is
counted by SQL, beside optuna. Not covered: the machine itself going down, where the disk decides, and a proxy
or a server that is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import psutil
import yaml

from bench import cpu_case
from dspark_deploy.launch.supervised import Supervised
from tests.support.grpc_proxy import grpc_proxy
from tests.support.postgres import postgres
from tests.support.stand_in import StandIn
from tests.support.sweeps import make
from tests.unit.profiles import TEXT
from tuning.conclusion import conclude
from tuning.space import from_params
from tuning.sweep import locked

COST_S = 0.1
SPACE = (
    TEXT
    + """\
sweep:
  space:
    num_speculative_tokens: [none, 1, 2, 3, 4, 5]
    draft_sample_method: [greedy]
  loads: [1, 8]
  boots: 0
"""
)
ORPHAN_S = 10.0
COMPLETE = (
    "select a.value_json, t.number from trials t join trial_user_attributes a "
    "on a.trial_id = t.trial_id and a.key = 'configuration' where t.state = 'COMPLETE'"
)


@dataclass(frozen=True)
class Place:
    """Where a sweep keeps its trials: the URL it is given, None for its own file, and what is complete."""

    url: str | None
    rows: Callable[[], list[tuple[str, int]]]

    def complete(self) -> dict[str, int]:
        """The trial of each configuration that is complete."""
        return dict(self.rows())


def _of_file(file: Path) -> list[tuple[str, int]]:
    if not file.exists():
        return []
    with sqlite3.connect(file) as database, contextlib.suppress(sqlite3.OperationalError):  # no tables yet
        return database.execute(COMPLETE).fetchall()
    return []


def _of_server(url: str) -> list[tuple[str, int]]:
    import psycopg2

    with contextlib.closing(psycopg2.connect(url)) as database, database.cursor() as cursor:
        cursor.execute("select to_regclass('trial_user_attributes')")
        if cursor.fetchone() == (None,):
            return []
        cursor.execute(COMPLETE)
        return list(cursor.fetchall())


@contextmanager
def place(kind: str, folder: Path, server: str) -> Iterator[Place]:
    """A storage of this sweep alone: `sqlite`, `postgres` or `grpc`, the last two on `server`."""
    if kind == "sqlite":
        yield Place(None, lambda: _of_file(folder / "out" / "study.db"))
        return
    import psycopg2

    name = f"sweep_{folder.name}"
    with contextlib.closing(psycopg2.connect(server)) as database:
        database.autocommit = True
        database.cursor().execute(f"create database {name}")
    url = f"{server.rpartition('/')[0]}/{name}"
    with grpc_proxy(url) if kind == "grpc" else contextlib.nullcontext(url) as given:
        yield Place(given, lambda: _of_server(url))


class WithProcess(StandIn):
    """The stand-in, holding a process under a guardian meanwhile; both numbers are written down."""

    notes: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        folder = args[4]
        with Supervised(["sleep", "600"], os.environ, folder / "sleep.log", grace_s=0.5) as process:
            with self.notes.open("a") as handle:
                handle.write(f"{folder.name} {process.pid}\n")
            return super().__call__(*args, **kwargs)


def sweep(folder: Path, url: str | None) -> None:
    """One sweep, whole, in this process."""
    engine = WithProcess(cost_s=COST_S)
    engine.notes = folder / "launched"
    with locked(folder / "out"):
        campaign = make(folder, engine, SPACE, storage=url)
        campaign.run()
        conclude(campaign, report=False)


def fork(folder: Path, url: str | None) -> int:
    """A sweep in a process of its own, without the seconds that imports take. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sweep(folder, url)
            code = 0
        finally:
            os._exit(code)
    return pid


def launched(folder: Path) -> list[tuple[str, int]]:
    """Label and guardian of each launch so far."""
    file = folder / "launched"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(label, int(pid)) for label, _, pid in (line.partition(" ") for line in lines)]


def broken(folder: Path) -> list[str]:
    """Files below the folder that hold half of something."""
    found = []
    for path in folder.rglob("*"):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".yaml":
                yaml.safe_load(path.read_text())
        except (ValueError, yaml.YAMLError) as error:
            found.append(f"{path.name}: {error}")
    return found


def below(pid: int) -> list[psutil.Process]:
    """Processes below one."""
    return psutil.Process(pid).children(recursive=True)


def kill_one(folder: Path, stored: Place, after_s: float) -> dict[str, Any]:
    """Sweep, kill, look, sweep again, look."""
    pid = fork(folder, stored.url)
    time.sleep(after_s)
    family = below(pid)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    before, started = stored.complete(), launched(folder)
    _, orphans = psutil.wait_procs(family, ORPHAN_S)
    halves = broken(folder / "out") if (folder / "out").exists() else []
    _, ended = os.waitpid(fork(folder, stored.url), 0)
    after = stored.complete()
    again = [label for label, _ in launched(folder)[len(started) :]]
    result = json.loads((folder / "out" / "result.json").read_text())
    labels = {cell["configuration"]: cell["state"] for cell in result["cells"]}
    done = {from_params(json.loads(cell)).label for cell in before}
    left = [path.name for path in (folder / "out").glob(".*.partial")]
    return {
        "after_s": round(after_s, 3),
        "killed": os.WIFSIGNALED(status),
        "complete_at_kill": len(before),
        "complete_at_end": len(after),
        "lost": sum(after.get(cell) != number for cell, number in before.items()),
        "duplicates": len(done & set(again)) + len(again) - len(set(again)),
        "launched_more": len(started) + len(again) - len(labels),
        "orphans": len(orphans),
        "broken": len(halves) + len(left),
        "resumed": ended == 0 and set(labels.values()) == {"complete"},
    }


def run(kills: int, seed: int, storage: str = "sqlite") -> dict[str, Any]:
    """All kills, and their sums."""
    moments = random.Random(seed)
    rows = []
    server = contextlib.nullcontext("") if storage == "sqlite" else postgres()
    with tempfile.TemporaryDirectory() as name, server as url:
        folder = Path(name) / "whole"
        folder.mkdir()
        with place(storage, folder, url) as stored:
            started = time.monotonic()
            os.waitpid(fork(folder, stored.url), 0)
            whole_s = time.monotonic() - started
        for number in range(kills):
            folder = Path(name) / f"{number}"
            folder.mkdir()
            with place(storage, folder, url) as stored:
                rows.append(kill_one(folder, stored, moments.uniform(0, whole_s)))
    sums = {key: sum(row[key] for row in rows) for key in ("lost", "duplicates", "orphans", "broken")}
    good = not any(sums.values()) and all(row["resumed"] and row["launched_more"] <= 1 for row in rows)
    return {
        "origin": f"stand-in engine of fixed cost ({COST_S} s a configuration), a real process beside it",
        "storage": storage,
        "configurations": rows[0]["complete_at_end"],
        "whole_sweep_s": round(whole_s, 2),
        "kills": kills,
        "killed_while_running": sum(row["killed"] for row in rows),
        "seed": seed,
        **sums,
        "launched_more": sum(row["launched_more"] for row in rows),
        "good": good,
        "by_kill": rows,
    }


def main() -> None:
    """Kill, and print the count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", choices=["sqlite", "postgres", "grpc"], default="sqlite")
    parser.add_argument("--out", type=Path, help="write the document here as well")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    document = run(options.kills, options.seed, options.storage)
    document |= {key: cpu_case.machine()[key] for key in ("machine", "python", "date")}
    given = f"--kills {options.kills} --seed {options.seed} --storage {options.storage}"
    document["command"] = f"python -m bench.kill9 {given}"
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "by_kill"}))
    sys.exit(0 if document["good"] else 1)


if __name__ == "__main__":
    main()
