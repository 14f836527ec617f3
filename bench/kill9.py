"""A sweep killed by SIGKILL at random moments: what is lost, launched twice, or left behind?

    python -m bench.kill9 --kills 50 --out bench/results/kill9.json
    python -m bench.kill9 --kills 4 --seed 7

Each kill has a sweep of its own: it runs, is killed at a moment drawn evenly from the time that a whole one
takes, from its opening to its last file, and is run again to its end. The engine is a stand-in of fixed cost
that holds a real process under the guardian, as an engine's is. Then the count, all of which must be 0:

    lost         configurations complete in the storage when it was killed, and not in the final result, or
                 under another trial
    duplicates   configurations launched again after they were complete
    orphans      processes of the killed sweep that are there ten seconds later
    broken       files that can't be read after the kill, or partial ones left after the second run

and `launched_more` is at most 1 a kill: the one that ran. Not covered: the machine itself going down, where
the disk decides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna
import psutil
import yaml

from bench import cpu_case
from dspark_deploy.launch.supervised import Supervised
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


class WithProcess(StandIn):
    """The stand-in, holding a process under a guardian meanwhile; both numbers are written down."""

    notes: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        folder = args[4]
        with Supervised(["sleep", "600"], os.environ, folder / "sleep.log", grace_s=0.5) as process:
            with self.notes.open("a") as handle:
                handle.write(f"{folder.name} {process.pid}\n")
            return super().__call__(*args, **kwargs)


def sweep(folder: Path) -> None:
    """One sweep, whole, in this process."""
    engine = WithProcess(cost_s=COST_S)
    engine.notes = folder / "launched"
    with locked(folder / "out"):
        campaign = make(folder, engine, SPACE)
        campaign.run()
        conclude(campaign, report=False)


def fork(folder: Path) -> int:
    """A sweep in a process of its own, without the seconds that imports take. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sweep(folder)
            code = 0
        finally:
            os._exit(code)
    return pid


def complete(folder: Path) -> dict[str, int]:
    """The trial of each configuration that is complete in the storage."""
    file = folder / "out" / "study.db"
    if not file.exists():
        return {}
    with sqlite3.connect(file) as database:
        if not database.execute(
            "select 1 from sqlite_master where name = 'trial_user_attributes'"
        ).fetchone():
            return {}
        rows = database.execute(
            "select a.value_json, t.number from trials t join trial_user_attributes a "
            "on a.trial_id = t.trial_id and a.key = 'configuration' where t.state = 'COMPLETE'"
        ).fetchall()
    return dict(rows)


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


def kill_one(folder: Path, after_s: float) -> dict[str, Any]:
    """Sweep, kill, look, sweep again, look."""
    pid = fork(folder)
    time.sleep(after_s)
    family = below(pid)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    before, started = complete(folder), launched(folder)
    _, orphans = psutil.wait_procs(family, ORPHAN_S)
    halves = broken(folder / "out") if (folder / "out").exists() else []
    _, ended = os.waitpid(fork(folder), 0)
    after = complete(folder)
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


def run(kills: int, seed: int) -> dict[str, Any]:
    """All kills, and their sums."""
    moments = random.Random(seed)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "whole"
        folder.mkdir()
        started = time.monotonic()
        os.waitpid(fork(folder), 0)
        whole_s = time.monotonic() - started
        for number in range(kills):
            folder = Path(name) / f"{number}"
            folder.mkdir()
            rows.append(kill_one(folder, moments.uniform(0, whole_s)))
    sums = {key: sum(row[key] for row in rows) for key in ("lost", "duplicates", "orphans", "broken")}
    good = not any(sums.values()) and all(row["resumed"] and row["launched_more"] <= 1 for row in rows)
    return {
        "origin": f"stand-in engine of fixed cost ({COST_S} s a configuration), a real process beside it",
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
    parser.add_argument("--out", type=Path, help="write the document here as well")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    document = run(options.kills, options.seed)
    document |= {key: cpu_case.machine()[key] for key in ("machine", "python", "date")}
    document["command"] = f"python -m bench.kill9 --kills {options.kills} --seed {options.seed}"
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "by_kill"}))
    sys.exit(0 if document["good"] else 1)


if __name__ == "__main__":
    main()
