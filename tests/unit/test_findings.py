"""Every code of the preflight has an example that triggers it and one that does not; the page is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_deploy.preflight import RULES
from tests.unit.findings import BASES, EXAMPLES, PAGE, Change, findings, page

CODES = [code for rule in RULES for code in rule.codes]


def test_every_code_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(CODES)


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
