"""Acceptance from counters: several engines are summed, scrapes are differenced, lies are noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.acceptance import (
    NO_DRAFTS,
    Acceptance,
    MetricsError,
    acceptance_between,
    parse_metrics,
)


def page(engines: list[tuple[int, list[int]]], k: int = 5, model: str = "m") -> str:
    """A metrics page: per engine, drafts and accepted tokens by position."""
    lines = []
    for engine, (drafts, positions) in enumerate(engines):
        labels = f'engine="{engine}",model_name="{model}"'
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}.0",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {drafts * k}.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {sum(positions)}.0",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.78e+09",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{j}"}} {count}.0'
            for j, count in enumerate(positions)
        ]
    return "\n".join(lines) + "\n"


BEFORE = [(400, [280, 180, 120, 70, 50]), (380, [260, 170, 110, 60, 40])]
AFTER = [(1400, [1020, 720, 470, 290, 200]), (1380, [980, 690, 440, 260, 170])]


def between(before: list[tuple[int, list[int]]], after: list[tuple[int, list[int]]]) -> Acceptance:
    return acceptance_between(parse_metrics(page(before)), parse_metrics(page(after)))


def test_two_engines_are_summed_and_differenced() -> None:
    found = between(BEFORE, AFTER)
    assert (found.drafts, found.accepted) == (2000, 3900)
    assert found.length == pytest.approx(2.95)
    assert found.draft_acceptance_rate == pytest.approx(0.39)
    assert found.position_rates == pytest.approx([0.73, 0.53, 0.34, 0.21, 0.14])
    assert found.length == pytest.approx(1 + sum(found.position_rates))


def test_a_restarted_engine_is_noticed() -> None:
    with pytest.raises(MetricsError, match="restarted"):
        between(AFTER, BEFORE)


def test_an_engine_that_vanished_is_noticed() -> None:
    with pytest.raises(MetricsError, match="gone"):
        between(BEFORE, AFTER[:1])


def test_sums_that_contradict_one_another_are_noticed() -> None:
    text = page(AFTER).replace("} 1020.0", "} 1000.0")
    with pytest.raises(MetricsError, match="by position"):
        acceptance_between(parse_metrics(page(BEFORE)), parse_metrics(text))


@pytest.mark.parametrize(
    ("old", "new"), [("} 1020.0", "} NaN"), ("} 2700.0", "} +Inf"), ('"0"} 1020', '"x"} 1020')]
)
def test_counters_that_are_no_counts(old: str, new: str) -> None:
    text = page([(1400, [1020, 720, 470, 290, 200])])
    assert old in text
    with pytest.raises(MetricsError):
        acceptance_between({}, parse_metrics(text.replace(old, new)))


def test_without_speculation_the_length_is_one() -> None:
    scrape = parse_metrics("vllm:generation_tokens_total 5.0\n")
    found = acceptance_between(scrape, scrape)
    assert found == NO_DRAFTS and found.length == 1.0 and found.draft_acceptance_rate is None


def test_label_values_with_spaces_and_quotes() -> None:
    before = parse_metrics(page(BEFORE, model='a \\"b\\" c, d'))
    after = parse_metrics(page(AFTER, model='a \\"b\\" c, d'))
    assert acceptance_between(before, after).length == pytest.approx(2.95)


@pytest.mark.parametrize("text", ["<html>502</html>", "a{b", 'a{b="c"} x', "{}"])
def test_a_page_that_is_no_metrics_page(text: str) -> None:
    with pytest.raises(MetricsError):
        parse_metrics(text)


@given(st.text(max_size=200))
def test_no_page_gives_another_exception(text: str) -> None:
    try:
        parse_metrics(text)
    except MetricsError as error:
        assert str(error)


counts = st.tuples(st.integers(0, 1000), st.lists(st.integers(0, 1000), max_size=8)).map(
    lambda t: Acceptance(t[0], t[0] * 8, sum(t[1]), tuple(t[1]))
)


@given(counts, counts)
def test_pooling_adds_the_sums(one: Acceptance, other: Acceptance) -> None:
    both = one + other
    assert both.drafts == one.drafts + other.drafts
    assert both.accepted == sum(both.per_position) == one.accepted + other.accepted
    assert one + NO_DRAFTS == one
