"""Several workers on one study: they share it, none measures what another does, and any of them may die.

Workers are processes with a stand-in engine of fixed cost. The storages are real: a journal file, a
PostgreSQL server that the test starts, and optuna's gRPC proxy before it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from dspark_deploy.errors import InputError, MeasurementError
from tests.support.grpc_proxy import grpc_proxy
from tests.support.postgres import PASSWORD, postgres
from tests.support.stand_in import StandIn
from tests.support.sweeps import make, sweep
from tests.support.worker import CELLS, workers
from tuning import storage as storages
from tuning.space import Configuration, Space
from tuning.storage import file_system, open_storage
from tuning.study import Study
from tuning.trials import open_study
from tuning.workers import Pulse, beating, is_alive, own_gpus, visible_gpus, worker_name


@contextmanager
def storage_of(kind: str, folder: Path) -> Iterator[str]:
    """A storage that several workers can share."""
    if kind == "journal":
        yield f"journal:///{folder}/study.log"
    elif kind == "grpc over sqlite":
        with grpc_proxy(f"sqlite:///{folder}/study.db") as url:
            yield url
    else:
        with postgres() as url:
            if kind == "postgresql":
                yield url
            else:
                with grpc_proxy(url) as proxied:
                    yield proxied


@pytest.mark.parametrize("kind", ["journal", "postgresql", "grpc over sqlite", "grpc over postgresql"])
def test_two_workers_share_a_study(tmp_path: Path, kind: str) -> None:
    """Each configuration once, and both come to the same end."""
    with storage_of(kind, tmp_path) as storage, workers(tmp_path / "two", storage, 2) as both:
        results = [each.end() for each in both]
        for each in both:
            console = (each.folder / "console").read_text()
            assert PASSWORD not in console + each.stderr
            assert PASSWORD not in (each.folder / "result.json").read_text()
    launched = [label for each in results for label in each["launched"]]
    assert sorted(launched) == sorted(set(launched)) and len(launched) == CELLS
    assert all(each["launched"] for each in results)
    assert results[0]["cells"] == results[1]["cells"]
    assert all(state == "complete" for _, state in results[0]["cells"])


def test_a_waiting_trial_of_an_sqlite_file_is_taken_once(tmp_path: Path) -> None:
    """As by two workers behind a proxy; optuna alone tells both that most of these are theirs."""
    storages = [open_storage(f"sqlite:///{tmp_path}/study.db") for _ in range(2)]
    study = optuna.create_study(storage=storages[0])
    waiting = create_trial(state=TrialState.WAITING)
    trials = [storages[0].create_new_trial(study._study_id, waiting) for _ in range(30)]
    together, taken = threading.Barrier(2), list[int]()

    def take(storage: BaseStorage) -> None:
        for trial in trials:
            together.wait(timeout=30)
            if storage.set_trial_state_values(trial, TrialState.RUNNING):
                taken.append(trial)

    threads = [threading.Thread(target=take, args=(storage,)) for storage in storages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == trials


def test_two_workers_take_turns_at_the_grid(tmp_path: Path) -> None:
    """Against a worker alone; the engine is a stand-in that sleeps for a fixed time.

    `bench/workers.py` holds two to 0.6 of one's time, by itself (docs/scale.md). The bound here
    is for cores that run other tests as well: without sharing it would be 1.
    """
    times = []
    for number in (1, 2):
        storage = f"journal:///{tmp_path}/study-{number}.log"
        with workers(tmp_path / f"{number}", storage, number, 1.0) as found:
            times.append(max(each.end()["seconds"] for each in found))
    assert times[1] <= 0.8 * times[0], times


@pytest.mark.parametrize("after_s", [0.3, 1.4])
def test_killing_a_worker_loses_at_most_its_running_trial(tmp_path: Path, after_s: float) -> None:
    storage = f"journal:///{tmp_path}/study.log"
    with workers(tmp_path / "two", storage, 2) as (first, second):
        time.sleep(after_s)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        result = second.end()
        lost = first.launched
    assert all(state == "complete" for _, state in result["cells"]) and len(result["cells"]) == CELLS
    everything = lost + second.launched
    assert len(everything) <= CELLS + 1, "only what ran when it died was measured again"
    assert set(everything) == {label for label, _ in result["cells"]}


def test_the_reference_of_a_dead_worker_is_measured_by_the_one_that_waits(tmp_path: Path) -> None:
    """The last worker must not wait for ever for answers to compare with."""
    storage = f"journal:///{tmp_path}/study.log"
    first = make(tmp_path, StandIn(), storage=storage)
    claimed = first.study.claim()
    assert claimed is not None and claimed[0].label == "none"
    first.study.beat(claimed[1], 1)
    first.study.study.get_trials()[0]
    claimed[1].set_user_attr("worker", worker_name().rpartition(":")[0] + ":0.00")  # one that has ended
    done = sweep(tmp_path, StandIn(), name="second", storage=storage)
    assert sorted(done.engine.launched) == ["k1-greedy", "k3-greedy", "k5-greedy", "none"]


class Flaky(Study):
    """A study whose storage answers only the third time."""

    tries = 0

    def complete(self, *args: Any, **kwargs: Any) -> bool:
        Flaky.tries += 1
        if Flaky.tries % 3:
            raise optuna.exceptions.StorageInternalError("server closed the connection")
        return super().complete(*args, **kwargs)


def test_a_storage_that_restarts_costs_no_measurement(tmp_path: Path) -> None:
    Flaky.tries = 0
    engine = StandIn()
    campaign = make(tmp_path, engine)
    campaign.first_wait_s = 0.001
    campaign.study.__class__ = Flaky
    campaign.run()
    assert len(engine.launched) == 4 and Flaky.tries == 12
    assert all(each.measurement for each in campaign.study.outcomes().values())


def test_a_storage_that_is_gone_is_named_and_nothing_that_ended_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = make(tmp_path, StandIn(), storage=f"journal:///{tmp_path}/s.log")

    def gone(*_: object) -> None:
        raise optuna.exceptions.StorageInternalError(f"postgresql://tuner:{PASSWORD}@db/x is gone")

    monkeypatch.setattr(campaign.study, "claim", gone)
    with pytest.raises(MeasurementError, match="no longer answers") as caught:
        campaign.run()
    assert PASSWORD not in str(caught.value) and "run the same command again" in str(caught.value)


def shared(folder: Path, worker: str, pulse: Pulse | None = None) -> Study:
    cells = [Configuration(0), Configuration(1, "greedy")]
    choices: dict[str, list[Any]] = {"num_speculative_tokens": [0, 1], "draft_sample_method": ["greedy"]}
    storage = open_storage(f"sqlite:///{folder}/shared.db")
    own = open_study(storage, "shared", {}, "grid")
    return Study(own, Space(cells, choices), worker, pulse=pulse or Pulse())


def test_a_worker_elsewhere_is_dead_when_its_beats_stop(tmp_path: Path) -> None:
    now = [0.0]
    here = shared(tmp_path, "here", Pulse(stale_s=60, clock=lambda: now[0]))
    there = shared(tmp_path, "other-host/x/1:7:1.00")
    claimed = there.claim()
    assert claimed is not None
    for count in range(1, 6):  # it beats: however long it takes, it is alive
        there.beat(claimed[1], count)
        here.bury_the_dead()
        now[0] += 50
        here.bury_the_dead()
    assert list(here.running()) == [Configuration(0)]
    now[0] += 50
    here.bury_the_dead()
    assert here.running() == {}
    assert not there.complete(claimed[1], *_numbers(), -0.05), "it comes back, and its trial is gone"
    again = here.claim()
    assert again is not None and again[0] == Configuration(0)


def _numbers() -> Any:
    from tests.unit.measurements import answers, measurement

    return measurement({1: [2.0]}), answers(9, 10)


def test_one_configuration_has_one_worker(tmp_path: Path) -> None:
    one, two = shared(tmp_path, "a/x/1:7:1.00"), shared(tmp_path, "b/x/1:7:1.00")
    first, second = one.claim(), two.claim()
    assert first is not None and second is not None and first[0] != second[0]
    assert two.claim() is None and two.claim_this(first[0]) is None


def test_a_wish_that_another_worker_was_handed_is_its_own(tmp_path: Path) -> None:
    """Optuna hands out waiting trials in order: what comes may be what another worker asked for."""
    one, two = shared(tmp_path, "a/x/1:7:1.00"), shared(tmp_path, "b/x/1:7:1.00")
    one.study.enqueue_trial(
        {"num_speculative_tokens": 1, "draft_sample_method": "greedy"},
        user_attrs={"configuration": Configuration(1, "greedy").params(), "worker": one.worker},
    )
    claimed = two.claim()
    assert claimed is not None and claimed[0] == Configuration(1, "greedy")
    assert claimed[1].params == {"num_speculative_tokens": 1, "draft_sample_method": "greedy"}
    rest = one.claim()
    assert rest is not None and rest[0] == Configuration(0)


def test_four_workers_open_an_empty_database_at_one_moment() -> None:
    """Optuna makes its tables without a lock, and PostgreSQL tells all but one that they exist."""
    opened: list[object] = []
    barrier = threading.Barrier(4)

    def run(url: str) -> None:
        barrier.wait(10)
        opened.append(open_storage(url))

    with postgres() as url:
        threads = [threading.Thread(target=run, args=(url,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(opened) == 4
        opened.clear()


def test_who_is_dead() -> None:
    mine = worker_name()
    assert is_alive(mine)
    place, _, _ = mine.rsplit(":", 2)
    assert is_alive(f"{place}:{os.getpid()}:1.00") is False, "another process had this pid"
    assert is_alive(f"{place}:999999999:1.00") is False
    assert [is_alive(name) for name in ("elsewhere/x/1:1:1.00", "", "nonsense")] == [None] * 3


def test_beats_rise_and_survive_a_storage_that_fails() -> None:
    seen: list[int] = []
    enough = threading.Event()

    def beat(count: int) -> None:
        seen.append(count)
        if count == 2:
            raise OSError("no route to host")
        if count == 4:
            enough.set()

    with beating(beat, every_s=0.01):
        assert enough.wait(10)
    ended = len(seen)
    time.sleep(0.05)
    assert seen == list(range(1, ended + 1)) and len(seen) == ended


def test_gpus_are_owned_by_one_worker(tmp_path: Path) -> None:
    with own_gpus([0, 1], tmp_path):
        with pytest.raises(InputError, match="GPU 1 is another worker's"), own_gpus([2, 1], tmp_path):
            pass
        with own_gpus([2, 3], tmp_path):
            pass
    with own_gpus([1], tmp_path):
        pass
    assert visible_gpus("rocm", [2, 3]) == {"HIP_VISIBLE_DEVICES": "2,3"}
    assert visible_gpus("cuda", [0]) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_each_worker_shows_its_engines_only_its_gpus(tmp_path: Path) -> None:
    engine = StandIn()
    done = sweep(tmp_path, engine, gpus=(4, 5))
    assert {p.profile.engine.env["CUDA_VISIBLE_DEVICES"] for p in engine.profiles} == {"4,5"}
    assert "CUDA_VISIBLE_DEVICES" not in (tmp_path / "out" / "best.yaml").read_text()
    assert done.result["best"]
    other = sweep(tmp_path, StandIn(), gpus=(6, 7))
    assert other.engine.launched == [], "which GPUs measured is no part of what was measured"


def test_sqlite_on_a_network_disk_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"root / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert file_system(tmp_path / "sub", mounts) == "nfs4"
    assert file_system(Path("/"), mounts) == "ext4"
    assert file_system(Path("/"), tmp_path / "none") == ""


def test_sqlite_on_nfs_names_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuning.storage.file_system", lambda folder: "nfs4")
    with pytest.raises(InputError, match="use journal:///FILE there"):
        open_storage(f"sqlite:///{tmp_path}/s.db")


def test_an_unreachable_server_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg2")
    with pytest.raises(InputError, match="can't be used as storage") as caught:
        open_storage(f"postgresql://tuner:{PASSWORD}@127.0.0.1:1/x")
    assert PASSWORD not in str(caught.value)
    assert "see that the server is up" in str(caught.value) and "damaged" not in str(caught.value)


def test_the_dashboard_reads_the_same_storage(tmp_path: Path) -> None:
    """What optuna-dashboard shows: names of the metrics, constraint, and TPOT by load, without our code."""
    sweep(tmp_path, storage=f"journal:///{tmp_path}/study.log")
    storage = open_storage(f"journal:///{tmp_path}/study.log")
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert study.metric_names == ["tpot_ms", "output_tokens_per_s_per_gpu"]
    assert all({"tpot_ms@1", "tpot_ms@8"} <= set(trial.user_attrs) for trial in study.trials)
    assert all("accuracy" in trial.constraints for trial in study.trials)


@pytest.mark.parametrize(
    "said",
    [
        "table studies already exists",
        "UNIQUE constraint failed: alembic_version.version_num",
        "duplicate key value",
    ],
)
def test_a_worker_that_meets_another_making_the_tables_tries_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    real, tries = storages._open, []

    def open_once_in_vain(url: str) -> Any:
        tries.append(url)
        if len(tries) == 1:
            raise SQLAlchemyError(said)
        return real(url)

    monkeypatch.setattr(storages, "_open", open_once_in_vain)
    monkeypatch.setattr(storages, "OPENING_S", 0.0)
    storages.open_storage(f"sqlite:///{tmp_path}/study.db")
    assert len(tries) == 2
