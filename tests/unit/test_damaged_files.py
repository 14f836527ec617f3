"""Damaged files of engines and runs: a message that names the file, and no traceback."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dspark_deploy.errors import InputError
from dspark_deploy.launch.command import redacted_command
from dspark_deploy.preflight.synthetic import config_of_flags
from tests.support.stand_in import StandIn
from tests.support.sweeps import sweep
from tuning.acceptance import MetricsError, acceptance_between, parse_metrics
from tuning.acceptance_log import read_log
from tuning.accuracy import AccuracyRun
from tuning.commands.gsm8k import _template_arguments
from tuning.commands.serve_best import best_profile
from tuning.gsm8k.completions import read_completions
from tuning.gsm8k.extraction import upstream
from tuning.jit_log import read_log as read_jit_log
from tuning.judging.divergence import read_beginnings
from tuning.workload import find_workload

GUARDED = (
    "dspark-deploy jit: library=tilelang kernel=post phase=serving tokens={tokens} seconds=1.0 "
    "source=compiled key=1\n"
)
LINE = (
    "SpecDecoding metrics: Mean acceptance length: 2.00, Accepted: {accepted} tokens, "
    "Drafted: 20 tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate: 50.0%"
)


@pytest.mark.parametrize("change", [{"rates": "0.9.1, 0.1"}, {"rates": "0.9,,"}, {"accepted": "1" * 5000}])
def test_a_damaged_line_is_named(tmp_path: Path, change: dict[str, str]) -> None:
    log = tmp_path / "engine.log"
    good = {"accepted": "10", "rates": "0.9, 0.1"}
    log.write_text(LINE.format(**good) + "\n")
    assert read_log(log).accepted == 10
    log.write_text(LINE.format(**good) + "\n" + LINE.format(**(good | change)) + "\n")
    with pytest.raises(InputError, match=r"engine\.log:2: "):
        read_log(log)


DRAFTS = "vllm:spec_decode_num_drafts"
DIGITS = "1" * 5000  # more than Python makes a number of


def test_numbers_beyond_python_are_none(tmp_path: Path) -> None:
    assert upstream(f"so {DIGITS}") is None
    log = tmp_path / "engine.log"
    log.write_text(GUARDED.format(tokens=DIGITS) + GUARDED.format(tokens=7))
    assert [each["tokens"] for each in read_jit_log(log).missing] == [7]


@pytest.mark.parametrize("text", ["1e999", "9" * 400, "-5"])
def test_positions_and_counters_that_no_engine_has(text: str) -> None:
    page = f"""\
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{text}"}} 3
"""
    with pytest.raises(MetricsError):
        acceptance_between({}, parse_metrics(page))
    with pytest.raises(MetricsError, match="is no count"):
        parse_metrics(f"# TYPE {DRAFTS} counter\n{DRAFTS}_total -1\n")


def journal_with(folder: Path, old: str, new: str) -> str:
    """The URL of a sweep's journal in which one thing is changed; every line of it is JSON."""
    url = f"journal:///{folder}/study"
    sweep(folder, StandIn(), storage=url)
    text = (folder / "study").read_text()
    assert re.search(old, text)
    (folder / "study").write_text(re.sub(old, new, text))
    return url


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r'"values": ?\[[\d.e+-]+, ?', '"values":["fast",'),
        (r'"values": ?\[[\d.e+-]+, ?', '"values":['),
        (r'"values": ?\[[^]]*\]', '"values":null'),
        (r'"values": ?\[[^]]*\]', f'"values":[1.5,{10**30}]'),
        (r'"num_speculative_tokens": ?\d', '"num_speculative_tokens":{}'),
        (r'"study_name": ?"[^"]*"', '"study_name":[]'),
        (r'"constraints:accuracy": ?[\d.e+-]+', '"constraints:accuracy":"kept"'),
        (r'"trial_id"', '"trail_id"'),
    ],
)
def test_a_journal_of_json_that_is_no_sweep_is_bad_input(tmp_path: Path, old: str, new: str) -> None:
    url = journal_with(tmp_path, old, new)
    with pytest.raises(InputError, match="start anew with"):
        sweep(tmp_path, StandIn(), storage=url, name="again")


def test_tables_of_another_optuna_are_bad_input(tmp_path: Path) -> None:
    sweep(tmp_path, StandIn(), storage=f"sqlite:///{tmp_path}/study")
    for change in (
        "update alembic_version set version_num = 'v0.9.0.a'",
        "update trial_values set value_type = 'ODD'",
        "update studies set study_name = x'00ff'",
        "insert into alembic_version values ('v2.6.0.a')",
        "update trial_user_attributes set value_json = 7.5",
    ):
        shutil.copy(tmp_path / "study", tmp_path / "changed")
        with closing(sqlite3.connect(tmp_path / "changed")) as database:
            database.execute(change)
            database.commit()
        with pytest.raises(InputError, match="start anew with"):
            sweep(tmp_path, StandIn(), storage=f"sqlite:///{tmp_path}/changed", name="again")


def test_nesting_beyond_the_parser_is_bad_input(tmp_path: Path) -> None:
    deep = tmp_path / "result.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(InputError):
        AccuracyRun.read(deep)
    with pytest.raises(InputError):
        read_completions(deep, "strict-8shot")
    with pytest.raises(InputError):
        best_profile(tmp_path, None)
    with pytest.raises(InputError):
        read_beginnings(deep)


def test_nesting_beyond_the_parser_is_bad_input_wherever_json_comes_from(tmp_path: Path) -> None:
    text = "[" * 100_000
    deep = tmp_path / "deep.jsonl"
    deep.write_text(text)
    for workload in ("jsonl", "sharegpt"):
        with pytest.raises(InputError, match="nested too deeply"):
            find_workload(workload, deep)
    with pytest.raises(InputError):
        _template_arguments(text, chat=True)
    assert config_of_flags(["--speculative-config", text]) == {}, "vLLM says it better"
    assert redacted_command(["--speculative-config", text]) == ["--speculative-config", text]


@pytest.mark.parametrize(
    ("workload", "text", "form"),
    [
        ("jsonl", '{"text": "no prompt"}', '{"prompt": "..."}'),
        ("jsonl", "[]", '{"prompt": "..."}'),
        ("sharegpt", "{}x", '{"conversations":'),
        ("sharegpt", "[1]", '{"conversations":'),
        ("speed-bench", '{"messages": []}', '{"messages":'),
    ],
)
def test_prompts_in_another_form(tmp_path: Path, workload: str, text: str, form: str) -> None:
    """The message has the form that is wanted, and no word of Python's."""
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        find_workload(workload, file)
    assert form in str(raised.value) and "Error(" not in str(raised.value)


def test_a_log_that_may_never_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (read_log, read_jit_log):
            with pytest.raises(InputError, match="is not a regular file"):
                read(path)
