"""A full disk, a storage locked, cut off or damaged: each is named, and nothing that ended is lost."""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.errors import FileError, InputError, MeasurementError
from dspark_deploy.launch.engine import Engine
from dspark_deploy.launch.rundir import RunDirectory, discard_partial, write_atomically
from dspark_deploy.profile import load_profile
from tests.support.stand_in import StandIn
from tests.support.sweeps import make, sweep
from tests.unit.facts import good_facts
from tuning import campaign as campaigns
from tuning import opening
from tuning import storage as storages
from tuning.conclusion import conclude
from tuning.workers import is_alive, worker_name

CELLS = ["none", "k1-greedy", "k3-greedy", "k5-greedy"]


class Meanwhile(StandIn):
    """Does something to the world while the second configuration is measured."""

    then: Callable[[], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = super().__call__(*args, **kwargs)
        if len(self.launched) == 2:
            self.then()
        return found


LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


def fill() -> None:
    """No file of this process may take a byte: what a full disk does, without one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, LIMIT[1]))


def free() -> None:
    """There is room again."""
    resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)


@contextmanager
def full_disk() -> Iterator[None]:
    """The disk is full inside."""
    fill()
    try:
        yield
    finally:
        free()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storages, "WAIT_S", 0.1)
    monkeypatch.setattr(campaigns, "WRITES", 2)
    yield
    free()


def url_of(kind: str, folder: Path) -> str:
    return f"{kind}:///{folder}/study.{kind}"


def breaks_and_goes_on(folder: Path, url: str, then: Callable[[], None], mend: Callable[[], None]) -> str:
    """A sweep whose world breaks at the second configuration, then a second one that loses nothing."""
    engine = Meanwhile()
    engine.then = then
    name = f"{worker_name().rpartition(':')[0].rpartition(':')[0]}:999999999:1"  # of a process that has ended
    try:
        with pytest.MonkeyPatch.context() as patched, pytest.raises((MeasurementError, FileError)) as caught:
            patched.setattr(opening, "worker_name", lambda: name)
            sweep(folder, engine, storage=url)
    finally:
        mend()
    assert engine.launched[0] == "none" and len(engine.launched) == 2 and caught.value.exit_code == 1
    again = sweep(folder, StandIn(), storage=url)
    assert "none" not in again.engine.launched, "it had ended"
    assert [cell["state"] for cell in again.result["cells"]] == ["complete"] * 4
    return str(caught.value)


def test_a_locked_database(tmp_path: Path) -> None:
    url, others = url_of("sqlite", tmp_path), []

    def lock() -> None:
        other = sqlite3.connect(tmp_path / "study.sqlite", isolation_level=None)
        other.execute("begin exclusive")
        others.append(other)

    said = breaks_and_goes_on(tmp_path, url, lock, lambda: others[0].close())
    assert "the storage no longer answers" in said and "locked" in said


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_storage_on_a_full_disk(tmp_path: Path, kind: str) -> None:
    said = breaks_and_goes_on(tmp_path, url_of(kind, tmp_path), fill, free)
    assert "the storage no longer answers" in said or "cannot be written" in said


def test_a_journal_cut_off_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """What SIGKILL of a writer leaves; the next writer must not write behind it."""
    url, journal = url_of("journal", tmp_path), tmp_path / "study.journal"
    done = sweep(tmp_path, StandIn(), storage=url, sets=["sweep.trials=2"])
    assert len(done.engine.launched) == 2
    with journal.open("ab") as handle:
        handle.write(b'{"op_code":8,"worker_id":"x","trial_id":1,"user_at')
    again = sweep(tmp_path, StandIn(), storage=url, name="again")
    assert len(again.engine.launched) == 2
    assert sorted(done.engine.launched + again.engine.launched) == sorted(CELLS)
    assert all(isinstance(json.loads(line), dict) for line in journal.read_text().splitlines())


WAITS = """\
import sys
from pathlib import Path
from tuning.storage import _TrimmingLock
lock = _TrimmingLock(Path(sys.argv[1]))
print("waiting", flush=True)
lock.acquire()
print("in", flush=True)
lock.release()
"""


def test_the_half_line_of_a_writer_that_lives_is_left_alone(tmp_path: Path) -> None:
    """Whoever trimmed before he had the lock would cut off what another process is writing."""
    journal = tmp_path / "study.journal"
    journal.write_bytes(b'{"line": 1}\n')
    lock = storages._TrimmingLock(journal)
    lock.acquire()
    with journal.open("ab", buffering=0) as handle:
        handle.write(b'{"line"')
        other = subprocess.Popen([sys.executable, "-c", WAITS, journal], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None and other.stdout.readline() == "waiting\n"
        time.sleep(0.5)
        assert other.poll() is None and journal.read_bytes().endswith(b'{"line"')
        handle.write(b": 2}\n")
    lock.release()
    said, _ = other.communicate(timeout=30)
    assert (said, other.returncode) == ("in\n", 0)
    assert [json.loads(line) for line in journal.read_text().splitlines()] == [{"line": 1}, {"line": 2}]


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("journal", lambda data: data[:200] + b"\x00garbage\n" + data[200:]),
        ("sqlite", lambda data: data[: len(data) // 2]),
        ("sqlite", lambda data: b"not a database" * 100),
        ("sqlite", lambda data: data[:4096] + b"\xff" * (len(data) - 4096)),
    ],
)
def test_a_damaged_storage_is_bad_input(tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]) -> None:
    url, file = url_of(kind, tmp_path), tmp_path / f"study.{kind}"
    sweep(tmp_path, StandIn(), storage=url)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InputError, match="can't be used as storage"):
        sweep(tmp_path, StandIn(), storage=url, name="again")


def test_a_database_damaged_while_the_sweep_runs(tmp_path: Path) -> None:
    file = tmp_path / "study.sqlite"
    engine = Meanwhile()
    engine.then = lambda: file.write_bytes(b"\xff" * file.stat().st_size)  # type: ignore[assignment]
    with pytest.raises(MeasurementError, match="the storage no longer answers"):
        sweep(tmp_path, engine, storage=url_of("sqlite", tmp_path))


def test_a_storage_lost_before_the_conclusion_is_named(tmp_path: Path) -> None:
    done = make(tmp_path, StandIn(), storage=url_of("sqlite", tmp_path))
    done.run()
    (tmp_path / "study.sqlite").write_bytes(b"gone")
    with pytest.raises(MeasurementError, match="What has ended is in it"):
        conclude(done, report=False)


def test_results_on_a_full_disk_keep_the_old_ones(tmp_path: Path) -> None:
    done = sweep(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    with full_disk(), pytest.raises(FileError, match="cannot be written: File too large"):
        conclude(done.campaign, report=False)
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert before == after


def test_an_engine_on_a_full_disk_is_not_started(tmp_path: Path) -> None:
    loaded = load_profile("cpu-tiny.yaml", ["engine.port=0"])
    with full_disk(), pytest.raises(FileError, match="cannot be written"):
        Engine.start(loaded, good_facts(), RunDirectory(tmp_path), [])
    missing = RunDirectory(tmp_path / "gone")
    with pytest.raises(FileError, match="No such file"):
        Engine.start(loaded, good_facts(), missing, [])


def test_a_full_disk_behind_stdout_is_said_on_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dspark_deploy.serve", "--profile", "cpu-tiny.yaml", "--check", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1 and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path) -> None:
    write_atomically(tmp_path / "result.json", "{}")
    (tmp_path / ".result.json.12.ab.partial").write_text('{"ha')
    discard_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_clock_that_steps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards by an hour each time that it is asked, and the name of a worker stays what it was."""
    name, clock = worker_name(), [time.time()]

    def stepping() -> float:
        clock[0] -= 3600
        return clock[0]

    monkeypatch.setattr(time, "time", stepping)
    monkeypatch.setattr("psutil._pslinux.boot_time", stepping)
    assert worker_name() == name and is_alive(name)
    done = sweep(tmp_path, StandIn(), storage=url_of("journal", tmp_path))
    assert [cell["state"] for cell in done.result["cells"]] == ["complete"] * 4
    assert all(second >= 0 for second in done.result["search"]["seconds"].values())
