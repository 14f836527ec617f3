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
    difference,
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


def fresh(engines: int, k: int) -> str:
    """The page of engines that have just started."""
    return page([(0, [0] * k)] * engines)


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
    ("old", "new"),
    [
        ("} 1020.0", "} NaN"),
        ("} 2700.0", "} +Inf"),
        ("} 2700.0", "} -5"),
        ("} 2700.0", "} 1e300"),
        ("} 1400.0", "} 1400.5"),
        ('"0"} 1020', '"x"} 1020'),
        ('"0"} 1020', '"-1"} 1020'),
        ('"0"} 1020', '"999999999"} 1020'),
    ],
)
def test_counters_that_are_no_counts(old: str, new: str) -> None:
    text = page(AFTER)
    assert old in text
    with pytest.raises(
        MetricsError, match=r'engine="0".* is no (count|position in a draft)|no count'
    ) as raised:
        parse_metrics(text.replace(old, new))
    assert "Error(" not in str(raised.value), "a person reads it, no programmer"


def test_two_pages_in_one_file() -> None:
    with pytest.raises(MetricsError, match="twice"):
        parse_metrics(page(BEFORE) + page(AFTER))


def test_an_engine_that_joined_is_not_taken_for_traffic() -> None:
    joined = [*AFTER, (900, [700, 500, 300, 200, 100])]
    for before, after in ((BEFORE, joined), (BEFORE[:1], AFTER), ([], AFTER)):
        scrape = parse_metrics(page(before)) if before else {}
        with pytest.raises(MetricsError, match=r"drafts_total.*second scrape only.*joined"):
            acceptance_between(scrape, parse_metrics(page(after)))


@pytest.mark.parametrize("name", ["generation_tokens", "request_success", "prefix_cache_queries"])
def test_what_other_numbers_rest_on_is_in_both_scrapes(name: str) -> None:
    """`past_end_share` and the prefix hit rate would count an engine's whole life too."""
    line = f'vllm:{name}_total{{engine="0"}} 7.0\n'
    with_it, without = parse_metrics(page(AFTER) + line), parse_metrics(page(AFTER))
    with pytest.raises(MetricsError, match="second scrape only"):
        difference(without, with_it)
    with pytest.raises(MetricsError, match="gone"):
        difference(with_it, without)


def test_swapped_pages_are_named_by_a_counter_of_ours() -> None:
    before = "python_gc_collections_total 9.0\n" + page(BEFORE)
    after = "python_gc_collections_total 3.0\n" + page(AFTER)
    assert acceptance_between(parse_metrics(before), parse_metrics(after)).drafts == 2000
    with pytest.raises(MetricsError, match=r"^vllm:spec_decode.*from 1400 to 400.*swapped"):
        acceptance_between(parse_metrics(after), parse_metrics(before))


def test_more_accepted_than_drafted() -> None:
    with pytest.raises(MetricsError, match="of 10 in all"):
        between([(0, [0, 0])], [(10, [11, 2])])


def test_without_speculation_the_length_is_one() -> None:
    scrape = parse_metrics("vllm:generation_tokens_total 5.0\n")
    found = acceptance_between(scrape, scrape)
    assert found == NO_DRAFTS and found.length == 1.0 and found.draft_acceptance_rate is None


def test_label_values_with_spaces_and_quotes() -> None:
    before = parse_metrics(page(BEFORE, model='a \\"b\\" c, d'))
    after = parse_metrics(page(AFTER, model='a \\"b\\" c, d'))
    assert acceptance_between(before, after).length == pytest.approx(2.95)


@pytest.mark.parametrize("text", ["<html>502</html>", "a{b", 'a{b="c"} x', "{}", "", "# HELP a b\n"])
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
