"""The engine's log: followed as it grows, and searched for why it ended."""

from __future__ import annotations

from pathlib import Path

from dspark_deploy.launch.log import LogFollower, meaningful_lines

FAILED_START = """\
(APIServer pid=1) INFO 12-02 03:46:41 [api_server.py:1] starting
(EngineCore pid=2) ERROR 12-02 03:46:52 [core.py:99] Traceback (most recent call last):
(EngineCore pid=2) ERROR 12-02 03:46:52 [core.py:99]   File "x.py", line 3, in load
(EngineCore pid=2) ERROR 12-02 03:46:52 [core.py:99] ValueError: size mismatch, got input (4)
(EngineCore pid=2) ERROR 12-02 03:46:52 [core.py:99] ValueError: size mismatch, got input (4)
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_cause_comes_out_once_and_without_its_wrapping(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(FAILED_START)
    assert meaningful_lines(log) == ["ValueError: size mismatch, got input (4)"]


def test_an_exception_of_several_lines_is_kept_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        '  File "x.py", line 121, in __init__\n'
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, max_model_len (100000) is greater than 1024\n"
        "    For further information visit a page\n"
    )
    assert meaningful_lines(log) == [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "Value error, max_model_len (100000) is greater than 1024",
    ]


def test_without_a_known_cause_the_last_lines_stand(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(50)))
    assert meaningful_lines(log, 3) == ["line 47", "line 48", "line 49"]


def test_no_log_is_no_traceback(tmp_path: Path) -> None:
    assert meaningful_lines(tmp_path / "none") == []


def test_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as handle:
        handle.write("ValueError: long ago\n")
        handle.write("x" * 2_000_000 + "\n")
        handle.write("MemoryError: just now\n")
    assert meaningful_lines(log) == ["MemoryError: just now"]


def characters_read() -> int:
    """What this process has read from files so far, in bytes."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_log_of_ten_gigabytes_is_not_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    log.write_text("INFO starting\n")
    assert follower.new_lines() == ["INFO starting"]
    with log.open("ab") as handle:
        handle.truncate(10 << 30)  # a hole; it takes no disk
    with log.open("ab") as handle:
        handle.write(b"\nMemoryError: just now\n")
    before = characters_read()
    lines = follower.new_lines()
    assert "bytes of the log are not shown" in lines[0] and lines[-1] == "MemoryError: just now"
    assert meaningful_lines(log) == ["MemoryError: just now"]
    assert characters_read() - before < 32 << 20
    with log.open("ab") as handle:
        handle.write(b"INFO and on\n")
    assert follower.new_lines() == ["INFO and on"]


def test_follower_gives_each_complete_line_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    assert follower.new_lines() == []
    with log.open("wb") as handle:
        handle.write(b"one\ntw")
        handle.flush()
        assert follower.new_lines() == ["one"]
        handle.write("o\r\nsch\N{LATIN SMALL LETTER O WITH DIAERESIS}n\n".encode())
        handle.flush()
        assert follower.new_lines() == ["two", "sch\N{LATIN SMALL LETTER O WITH DIAERESIS}n"]
    assert follower.new_lines() == []
