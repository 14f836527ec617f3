"""An engine that goes wrong at every stage: each fault ends in its state and exit code, and leaves nothing.

The engine is a stand-in; what faults look like in a real one has `tests/engine/test_serve.py`.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.errors import EngineStartError
from dspark_deploy.launch import engine as launching
from dspark_deploy.launch.engine import Engine, free_port
from dspark_deploy.launch.rundir import RunDirectory
from dspark_deploy.preflight import probe
from dspark_deploy.profile import load_profile
from tests.support.bad_engine import Handler, with_bad_engine
from tests.support.commands import QUICK, SWEEP, Command, whole
from tuning import endpoint
from tuning.acceptance import MetricsError
from tuning.endpoint import Endpoint, RequestFailed, Sampling

DIED = "exited with code 137 after it had been ready"


def states(folder: Path) -> list[tuple[str, str]]:
    """State and reason of each trial of the sweep in `folder`."""
    with sqlite3.connect(folder / "out" / "study.db") as database:
        rows = database.execute(
            "select t.state, a.value_json from trials t left join trial_user_attributes a "
            "on a.trial_id = t.trial_id and a.key = 'reason'"
        ).fetchall()
    return [(state, json.loads(reason or '""')) for state, reason in rows]


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        ({"fault": "exit at load"}, 5, "weights are not what config.json says"),
        ({"fault": "killed at load"}, 5, "exited with code 137 after"),
        ({"dies_at": 1}, 6, DIED),  # at warm-up
        ({"dies_at": 6}, 6, DIED),  # in the load
        ({"dies_at": 9}, 6, DIED),  # among the questions
        ({"fault": "garbage metrics"}, 1, "not a Prometheus page"),
        ({"fault": "error body"}, 1, "the engine is tired"),
        # Ended after its grace; the reason is the stand-in's own, which knows one answer to everything.
        ({"fault": "hang at shutdown"}, 1, "no question was answered rightly"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_sweep_names_the_fault_and_keeps_it(
    tmp_path: Path, bad: dict[str, Any], code: int, says: str
) -> None:
    ended = Command(tmp_path, "tune", *SWEEP, *QUICK, bad=bad).end()
    assert says in ended.stderr, ended.stderr
    assert (ended.code, ended.document["exit_code"]) == (code, code)
    ((state, reason),) = states(tmp_path)
    assert state == "FAIL" and says in reason
    whole(tmp_path)


def test_out_of_memory_under_load_lowers_one_setting_once(tmp_path: Path) -> None:
    ended = Command(tmp_path, "tune", *SWEEP, *QUICK, bad={"dies_at": 6, "memory": True}).end()
    assert ended.code == 6 and "OutOfMemoryError" in ended.stderr
    assert "max-num-seqs 16 -> 8, once" in ended.stderr, ended.stderr
    ((state, reason),) = states(tmp_path)
    assert state == "FAIL" and "OutOfMemoryError" in reason


def test_an_engine_that_hangs_at_start(tmp_path: Path) -> None:
    limit = ["--set", "engine.ready_timeout_s=1", "--set", "engine.port=0"]
    ended = Command(
        tmp_path, "serve", "--profile", "cpu-tiny.yaml", *limit, *QUICK, bad={"fault": "hang at start"}
    ).end()
    assert ended.code == 5 and "not ready within 1 s" in ended.stderr


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    with_bad_engine(monkeypatch)
    return monkeypatch


def start(folder: Path, *sets: str) -> Engine:
    """The stand-in engine, started as the commands do, in this process."""
    loaded = load_profile("cpu-tiny.yaml", ["engine.stop_timeout_s=1", "engine.port=0", *sets])
    return Engine.start(loaded, probe(loaded.profile), RunDirectory(folder), [])


def test_metrics_that_never_answer(tmp_path: Path, bad: pytest.MonkeyPatch) -> None:
    bad.setenv("BAD_ENGINE", '{"fault": "silent metrics"}')
    bad.setattr(endpoint, "SCRAPE_TIMEOUT_S", 0.3)
    with start(tmp_path) as engine:
        engine.wait_ready()
        with Endpoint(engine.url, "tiny") as client, pytest.raises(MetricsError, match="does not answer"):
            client.scrape()


def test_200_with_an_error_in_it_is_no_answer(tmp_path: Path, bad: pytest.MonkeyPatch) -> None:
    bad.setenv("BAD_ENGINE", '{"fault": "error body"}')
    with start(tmp_path) as engine:
        engine.wait_ready()
        with Endpoint(engine.url, "tiny") as client:
            for ask in (lambda s: client.complete("x", s), lambda s: client.chat([], s)):
                with pytest.raises(RequestFailed, match="the engine is tired"):
                    ask(Sampling(4))


def test_a_port_taken_between_check_and_start_is_not_our_engine(
    tmp_path: Path, bad: pytest.MonkeyPatch
) -> None:
    """Somebody else's server answers /health with 200 while ours has failed to bind, or hangs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        port = stranger.server_address[1]
        bad.setattr(launching, "free_port", lambda host: port)
        for name, fault, says in (
            ("exits", "none", "before it was ready"),
            ("hangs", "hang at start", "another process answers at"),
        ):
            bad.setenv("BAD_ENGINE", json.dumps({"fault": fault}))
            folder = tmp_path / name
            folder.mkdir()
            with start(folder, "engine.ready_timeout_s=2") as engine:
                with pytest.raises(EngineStartError, match=says) as caught:
                    engine.wait_ready()
                assert caught.value.exit_code == 5
        stranger.shutdown()


def test_who_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert launching.listens(os.getpid(), port)
        assert not launching.listens(os.getppid() + 1_000_000_000, port)
    assert not launching.listens(os.getpid(), free_port("127.0.0.1"))
