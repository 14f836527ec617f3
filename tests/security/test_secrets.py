"""Planted secrets are found in no log, report, file, document, message or process title.

Both commands run whole, as processes, on the stand-in engine, which writes its flags to its log as vLLM does.
"""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

import pytest

from tests.security.planted import ENVIRONMENT, PROFILE, SETS, Watched, finds
from tests.support.commands import QUICK
from tests.support.postgres import PASSWORD, postgres

LOCAL = ["--set", "engine.port=0", *QUICK]
# Of five questions the stand-in's one answer is right for the last.
SPACE = ["--num-speculative-tokens", "none,1", "--draft-sample-method", "greedy", "--loads", "1"]
SPACE += [
    "--prompts-per-load",
    "4",
    "--accuracy-problems",
    "5",
    "--accuracy-margin",
    "0.9",
    "--boots",
    "0",
    "--out",
    "out",
]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "work"
    inner.mkdir()
    return inner


@pytest.mark.parametrize("only", ["--check", "--dry-run", "--facts-only"])
def test_what_is_only_shown(folder: Path, only: str) -> None:
    ended = Watched(folder, "serve", only, *SETS, *LOCAL).end()
    assert ended.code == 0, ended.stderr
    if only == "--dry-run":
        shown = ended.document["environment"]
        assert {"HF_TOKEN", "WANDB_API_KEY", "SLACK_TOKEN", "COPY"} <= shown.keys()
        assert shown["UPSTREAM"] == "http://<redacted>@proxy:3128"


def test_serving(folder: Path) -> None:
    keyed = ["--set", "engine.args.api-key=planted-set-api-key"]
    watched = Watched(folder, "serve", *SETS, *LOCAL, *keyed)
    watched.command.wait_for('"ready"')
    engine = next(title for title in watched.titles if "-I" not in title and "serve" in title)
    assert "--served-model-name" in engine, "the engine's title was seen"
    watched.command.process.send_signal(signal.SIGTERM)
    assert watched.end().code == 130
    (run,) = (folder / "runs").iterdir()
    assert mode(run) == 0o700
    for name in ("command.json", "profile.yaml"):
        assert mode(run / name) == 0o600
    assert "HF_TOKEN" in json.loads((run / "command.json").read_text())["environment"]


def test_an_engine_that_does_not_start(folder: Path) -> None:
    ended = Watched(folder, "serve", *SETS, *LOCAL, bad={"fault": "exit at load"}).end()
    assert ended.code == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "engine.env.HF_TOKEN: planted-no-equals"], "write path=value"),
        (["--set", "engine.env.HF_TOKEN=[planted-no-yaml"], "not YAML"),
        (["--set", "engine.env={HF_TOKEN: [planted-list]}"], "HF_TOKEN"),
        (["--set", "engine.env=planted-instead-of-mapping"], "engine.env"),
        (["--set", "engine.env={HF_TOKEN: !!int planted-tagged}"], "tag"),
        (["--set", "engine.args.api-key=[planted-of-several]"], "engine.args.api-key"),
        (["--set", "engine.args.endpoint=http://u:planted-in-args@host"], "engine.args.endpoint"),
        (["--set", "engine.args.endpoint=http://u:planted/with@signs@host"], "engine.args.endpoint"),
        (["--set", 'engine.args={x: {y: ["http://u:planted-deep@host"]}}'], "engine.args.x"),
        (["--", "--api-key", "planted-behind-dashes"], "VLLM_API_KEY"),
        (["--", "--hf-token=planted-behind-dashes"], "HF_TOKEN"),
        (["--", "--endpoint", "http://u:planted-behind-dashes@host"], "--endpoint"),
    ],
)
def test_a_message_about_a_secret_does_not_show_it(folder: Path, arguments: list[str], says: str) -> None:
    ended = Watched(folder, "serve", "--dry-run", *LOCAL, *arguments).end()
    assert ended.code in (2, 3) and says in ended.stderr, ended.stderr


def test_a_profile_that_is_wrong(folder: Path) -> None:
    wrong = PROFILE.replace("WANDB_API_KEY: planted", "WANDB_API_KEY: !!int planted") + "token: planted-top\n"
    ended = Watched(folder, "serve", "--check", profile=wrong).end()
    assert ended.code == 2 and "work-profile.yaml:7: tag" in ended.stderr


def test_a_sweep(folder: Path) -> None:
    ended = Watched(folder, "tune", "sweep", *SETS, *QUICK, *SPACE).end()
    assert ended.code == 0, ended.stderr
    assert (folder / "out" / "report.html").is_file()
    best = folder / "out" / "best.yaml"
    assert mode(best) == 0o600
    assert "SLACK_TOKEN: ${SLACK_TOKEN}" in best.read_text()
    changed = [*SETS, "--set", "engine.env={LATE_TOKEN: planted-late}", *QUICK, *SPACE]
    refused = Watched(folder, "tune", "sweep", *changed).end()
    assert refused.code == 2 and "--seed-from" in refused.stderr, refused.stderr


def test_measure_and_its_report(folder: Path) -> None:
    plan = ["--loads", "1", "--requests", "4", "--accuracy-problems", "5", "--arms", "reference,fixed"]
    ended = Watched(folder, "tune", "measure", *SETS, *QUICK, *plan, "--out", "m").end()
    assert ended.code == 0, ended.stderr
    record = folder / "m" / "record.json"
    assert record.is_file(), ended.stderr
    assert Watched(folder, "tune", "report", str(record), "--out", "page.html").end().code == 0
    assert (folder / "page.html").is_file()


def test_a_storage_that_does_not_answer(folder: Path) -> None:
    for url in (
        "postgresql://tuner:planted-storage@127.0.0.1:1/sweeps",
        "postgresql://tuner:planted/storage@127.0.0.1:1/sweeps",
        "postgresql://127.0.0.1:1/sweeps?user=tuner&password=planted-query",
        "oracle://tuner:planted-kind@host/x",
    ):
        ended = Watched(folder, "tune", "sweep", *QUICK, *SPACE, "--storage", url).end()
        assert ended.code == 2, ended.stderr


def test_a_url_of_somebody_elses_engine(folder: Path) -> None:
    url = "http://someone:planted-url@127.0.0.1:1"
    env = ENVIRONMENT | {"HF_TOKEN": ""}
    for command in (["acceptance", "--url", url], ["divergence", "--url", url]):
        ended = Watched(folder, "tune", *command, profile=PROFILE, env=env).end()
        assert ended.code == 2


def test_the_search_finds_what_is_there(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "a.db").write_bytes(b"\0planted-x\0")
    assert finds(folder) == ["deep/a.db: b'\\x00planted-x\\x00'"]


def test_a_sweep_in_a_database(folder: Path) -> None:
    """The storage's password stays out of everything, the database included."""
    with postgres() as url:
        import psycopg2

        planted = url.replace(PASSWORD, "planted-password")
        with psycopg2.connect(url) as database, database.cursor() as cursor:
            cursor.execute("alter user tuner password 'planted-password'")
        ended = Watched(folder, "tune", "sweep", *SETS, *QUICK, *SPACE, "--storage", planted).end()
        assert ended.code == 0, ended.stderr
        with psycopg2.connect(planted) as database, database.cursor() as cursor:
            cursor.execute("select table_name from information_schema.tables where table_schema = 'public'")
            rows = []
            for (table,) in cursor.fetchall():
                cursor.execute(f'select row_to_json(t)::text from "{table}" t')
                rows += [row for (row,) in cursor.fetchall()]
        assert any("dspark-sweep-doors" in row for row in rows)
        assert not [row for row in rows if "planted-" in row]
