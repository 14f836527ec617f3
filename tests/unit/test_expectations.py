"""Which of a profile's expected ranges hold for a measurement, and what is said of a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dspark_deploy.profile.schema import Expectation
from tests.unit.profiles import TEXT, load
from tuning.commands.gsm8k import _unexpected
from tuning.expectations import Observed, holding, missed
from tuning.gsm8k.protocols import PROTOCOLS

LENGTH = (3.0, 4.0)


def observed(**changes: Any) -> Observed:
    """A healthy k=5 on coding prompts."""
    given: dict[str, Any] = {
        "label": "k5",
        "workload": "speed-bench-coding",
        "k": 5,
        "temperature": 0.0,
        "thinking": False,
        "acceptance_length": 3.5,
    }
    return Observed(**(given | changes))


def expected(**changes: Any) -> Expectation:
    """A range of acceptance lengths on coding prompts."""
    given: dict[str, Any] = {"workload": "speed-bench-coding", "acceptance_length": LENGTH}
    return Expectation(**(given | changes))


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({}, True),
        ({"workload": "sharegpt"}, False),
        ({"num_speculative_tokens": 5}, True),
        ({"num_speculative_tokens": 7}, False),
        ({"temperature": 0}, True),
        ({"temperature": 1}, False),
        ({"thinking": False}, True),
        ({"thinking": True}, False),
    ],
)
def test_a_range_holds_where_every_named_condition_does(condition: dict[str, Any], holds: bool) -> None:
    assert bool(holding([expected(**condition)], observed())) is holds


def test_a_condition_that_nobody_knows_is_not_met() -> None:
    assert not holding(
        [expected(thinking=True), expected(temperature=1)], observed(thinking=None, temperature=None)
    )


def test_gsm8k_holds_for_each_protocol_and_a_protocol_for_itself() -> None:
    both = [expected(workload="gsm8k"), expected(workload="gsm8k/vllm-8shot")]
    assert holding(both, observed(workload="gsm8k/vllm-8shot")) == both
    assert holding(both, observed(workload="gsm8k/thinking")) == both[:1]


def test_a_miss_is_a_sentence_with_its_source() -> None:
    ranges = [
        expected(source="vllm#1"),
        expected(acceptance_length=None, accuracy=(0.9, 1.0)),
        expected(acceptance_length=None, tpot_ms=(7.5, 10.5), concurrency=8),
    ]
    found = missed(ranges, observed(acceptance_length=2.5, accuracy=0.5, tpot_ms={1: 1.0, 8: 12.0}))
    assert found == [
        "k5: acceptance length 2.500 is outside the expected 3 to 4 (vllm#1)",
        "k5: accuracy 0.500 is outside the expected 0.9 to 1",
        "k5: TPOT in ms at load 8 12.000 is outside the expected 7.5 to 10.5",
    ]
    assert missed(ranges, observed()) == [], "what was not measured can't be missed"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"acceptance_length": (4.0, 3.0)}, "lower number to the higher"),
        ({"acceptance_length": None}, "give acceptance_length, accuracy or tpot_ms"),
        ({"tpot_ms": (1.0, 2.0)}, "give concurrency"),
    ],
)
def test_a_range_that_says_nothing_is_refused(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        expected(**broken)


def test_a_gsm8k_run_is_held_against_its_profile(tmp_path: Path) -> None:
    ranges = """\
expect:
  - {workload: gsm8k/vllm-8shot, accuracy: [0.88, 0.93], source: vllm#1}
  - {workload: gsm8k, num_speculative_tokens: 5, acceptance_length: [4.0, 4.8]}
  - {workload: gsm8k, thinking: true, accuracy: [0.99, 1.0]}
"""
    profile = load(tmp_path, TEXT + ranges).profile
    found = {"accuracy": 0.5, "acceptance": {"pooled": 2.0}}
    protocol = PROTOCOLS["vllm-8shot"]
    assert _unexpected(protocol, found, profile) == [
        "vllm-8shot: accuracy 0.500 is outside the expected 0.88 to 0.93 (vllm#1)",
        "vllm-8shot: acceptance length 2.000 is outside the expected 4 to 4.8",
    ]
    assert _unexpected(protocol, {"accuracy": None, "acceptance": None}, profile) == []
    assert _unexpected(protocol, found, None) == [], "a server by its URL has no profile"
