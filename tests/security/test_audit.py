"""`make audit` takes no silence for a clean bill, and the product declares what it imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import audit

GOOD = {"name": "httpx", "version": "1", "vulns": []}
UNKNOWN = {
    "name": "torch",
    "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2+cpu)",
}
BAD = {"name": "rich", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}


@pytest.mark.parametrize(
    ("packages", "code", "says"),
    [
        ([GOOD, GOOD, UNKNOWN], 0, "not audited: Dependency not found on PyPI"),
        ([GOOD, BAD], 1, "rich 1: CVE-1, fixed in 2"),
        ([UNKNOWN, UNKNOWN, GOOD], 2, "Nothing was audited"),
        ([], 2, "Nothing was audited"),
    ],
)
def test_the_verdict(packages: list[dict[str, object]], code: int, says: str) -> None:
    found, lines = audit.judge({"dependencies": packages})
    assert found == code and says in "\n".join(lines)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import time; time.sleep(60)", "did not end within"),
        ("import sys; sys.exit('requests.exceptions.ConnectionError: no name')", "ConnectionError: no name"),
        ("print('{')", "gave no answer"),
    ],
)
def test_a_program_that_fails_is_no_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    program = tmp_path / "pip-audit"
    program.write_text(f"#!{sys.executable}\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(audit, "TIMEOUT_S", 2)
    code, lines = audit.ask(str(program))
    assert code == 2 and says in lines[0] and "Nothing was audited" in lines[0]


def test_a_missing_program_is_no_audit(tmp_path: Path) -> None:
    assert audit.ask(str(tmp_path / "none"))[0] == 2


def test_what_is_imported_is_declared() -> None:
    assert audit.undeclared() == []
    assert audit.outside_their_range() == []


def test_an_undeclared_import_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "requirements", list)
    assert any("imports pydantic" in fault for fault in audit.undeclared())
