"""Every code of the preflight has an example that triggers it and one that does not; the page is current."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import dspark_deploy
import tuning
from dspark_deploy.preflight import RULES
from tests.unit.findings import BASES, EXAMPLES, MEASURING, PAGE, Change, findings, page
from tests.unit.profiles import load

CODES = [code for rule in (*RULES, *MEASURING) for code in rule.codes]
MAKERS = {"error", "warning", "note", "Finding", "_fault"}  # called with a code first


def written_codes() -> Iterator[tuple[str, str]]:
    """Module, and code of each finding that is made anywhere in the sources."""
    roots = [Path(package.__file__ or "").parent for package in (dspark_deploy, tuning)]
    for path in sorted(file for root in roots for file in root.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in MAKERS and call.args:
                for part in ast.walk(call.args[0]):
                    if (
                        isinstance(part, ast.Constant)
                        and isinstance(part.value, str)
                        and part.value.isupper()
                    ):
                        yield path.name, part.value


def test_every_code_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(CODES)


def test_every_finding_that_is_made_anywhere_has_an_example() -> None:
    written = list(written_codes())
    assert len(written) > len(CODES) / 2, "the sources are found"
    assert [each for each in written if each[1] not in EXAMPLES] == []


def test_a_rule_gives_only_the_codes_that_it_is_registered_for(tmp_path: Path) -> None:
    for example in EXAMPLES.values():
        text, facts = BASES[example.base]
        for change in (example.speaks, example.silent):
            launch = load(tmp_path, text, change.sets).with_flags(change.after)
            for rule in RULES:
                found = {finding.code for finding in rule.function(launch, replace(facts, **change.facts))}
                assert found <= set(rule.codes), rule.function.__name__


@pytest.mark.parametrize("base", BASES)
def test_nothing_to_say_on_a_good_machine(tmp_path: Path, base: str) -> None:
    assert findings(base, Change(), tmp_path) == []


@pytest.mark.parametrize("code", CODES)
def test_a_rule_speaks_and_is_silent(tmp_path: Path, code: str) -> None:
    example = EXAMPLES[code]
    said = [finding for finding in findings(example.base, example.speaks, tmp_path) if finding.code == code]
    assert said and said[0].message and said[0].remedy
    assert code not in {finding.code for finding in findings(example.base, example.silent, tmp_path)}


def test_every_rule_says_why_it_exists() -> None:
    assert all((rule.function.__doc__ or "").strip() for rule in RULES)


def test_the_page_is_made_from_the_rules() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.unit.findings"
