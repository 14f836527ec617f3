"""`dspark-tune jit-log`: what is no log of a server, sources and seconds of missed keys, colours, phases."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from dspark_deploy.errors import InputError
from tuning.jit_log import classify, read_log, report_lines

GUARD = (
    "(Worker pid=1) WARNING 12-02 08:11:06 [jit.py:1] dspark-deploy jit: library=tilelang kernel=post "
    "phase={phase} tokens={tokens} seconds={seconds} source={source} key=((4, 5120), ())"
)


def guard(
    phase: str = "serving", tokens: int = 5, seconds: str = "1.25", source: str = "compiled", end: str = ""
) -> str:
    """A line of the capture guard."""
    return GUARD.format(phase=phase, tokens=tokens, seconds=seconds, source=source) + end


SERVER = "INFO 12-02 08:11:06 [api_server.py:1] vLLM API server version 0.33.0\n"
NO_LOGS = {
    "empty": b"",
    "two lines": b"dear diary\nnothing was compiled today\n",
    "random": bytes(range(256)) * 64,
    "utf-16": (SERVER + guard() + "\n").encode("utf-16"),
    "packed": gzip.compress((SERVER + guard() + "\n").encode()),
}


@pytest.mark.parametrize("name", NO_LOGS)
def test_what_is_no_log_of_a_server_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "engine.log").write_bytes(NO_LOGS[name])
    with pytest.raises(InputError, match=r"engine\.log: no line of a vLLM server in this file; name"):
        read_log(tmp_path / "engine.log")


@pytest.mark.parametrize("line", [SERVER, f"\x1b[32m{SERVER}", "Application startup complete."])
def test_a_server_that_compiled_nothing_is_a_clean_log(tmp_path: Path, line: str) -> None:
    (tmp_path / "engine.log").write_text(line)
    log = read_log(tmp_path / "engine.log")
    assert log.missing == [] and not any(log.compiles.values())


@pytest.mark.parametrize("what", ["fifo", "folder", "/dev/null", "/dev/zero"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, what: str) -> None:
    path = tmp_path / "it" if what in ("fifo", "folder") else Path(what)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    with pytest.raises(InputError, match="not a regular file; save"):
        read_log(path)


def test_a_load_from_disk_is_told_from_a_compile() -> None:
    log = classify([guard(source="disk", seconds="0.03"), guard(), guard(end=" refused=1")])
    assert [(each["source"], each["seconds"]) for each in log.missing] == [
        ("disk", 0.03),
        ("compiled", 1.25),
        ("refused", 1.25),
    ]
    assert (log.from_disk, log.refused, log.compiles["serving"]["tilelang"]) == (1, 1, 1)
    lines = report_lines(log)
    assert sum(line.startswith("missed ") for line in lines) == 2
    expected = "from disk    tilelang post in serving, disk, 0.03 s, 5 tokens, key ((4, 5120), ())"
    assert expected in lines


def test_a_key_is_listed_once_with_the_longest_time() -> None:
    log = classify([guard(), guard(seconds="7.50"), guard(seconds="2"), guard("capture")])
    assert [(m["phase"], m["times"], m["seconds"]) for m in log.missing] == [
        ("serving", 3, 7.5),
        ("capture", 1, 1.25),
    ]
    assert any("compiled, 7.50 s (longest of 3), 5 tokens" in line for line in report_lines(log))


def test_a_log_without_the_guard_tells_no_time() -> None:
    late = "Triton kernel JIT compilation during inference: _late. This"
    log = classify(["Application startup complete.", late, late])
    assert [(m["kernel"], m["times"], m["seconds"]) for m in log.missing] == [("_late", 2, None)]
    assert any("time unknown" in line for line in report_lines(log))


def test_colours_do_not_hide_a_refusal() -> None:
    log = classify([f"\x1b[31m{guard(end=' refused=1')}\x1b[0m", f"{guard()}\x1b[0m"])
    assert log.refused == 1 and log.compiles["serving"]["tilelang"] == 1
    assert {each["key"] for each in log.missing} == {"((4, 5120), ())"}


def test_a_phase_of_another_version_is_shown() -> None:
    lines = report_lines(classify([guard("draining")]))
    assert "draining     tilelang 1" in lines
