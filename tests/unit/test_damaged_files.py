"""Damaged files of engines and runs: a message that names the file, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_deploy.errors import InputError
from dspark_deploy.launch.command import redacted_command
from dspark_deploy.preflight.synthetic import config_of_flags
from tuning.acceptance_log import read_log
from tuning.accuracy import AccuracyRun
from tuning.commands.gsm8k import _template_arguments
from tuning.commands.serve_best import best_profile
from tuning.gsm8k.completions import read_completions
from tuning.judging.divergence import read_beginnings
from tuning.workload import find_workload

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
