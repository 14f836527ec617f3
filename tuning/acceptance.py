"""Acceptance from the engine's own counters: two scrapes of `/metrics`, differenced, summed over engines.

    dspark-tune acceptance --before A.prom --after B.prom

    acceptance length   1 + accepted / drafts         tokens that one step yields, pooled over all steps
    per position        accepted at position j / drafts
    conditional         accepted at j / accepted at j - 1

The identity `acceptance length = 1 + sum(per position)` holds for whole scrapes; where it does not, an
engine was left out of a sum or restarted between the scrapes, and `Acceptance` refuses to be made. vLLM makes
every counter of an engine when the engine starts, so one that only one scrape has is an engine that joined,
left or was cut from a page: its whole life would be counted as this stretch of serving, and it is refused.
vLLM counts accepted drafts before it trims at a stop, so short answers look a little better than what
reaches the client; `past_end_share` says by how much (vllm#56101).

Not covered: one request's acceptance, which counters don't hold (`per_request` has it), and steps without
drafts, which vLLM doesn't count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from dspark_deploy.errors import MeasurementError

PREFIX = "vllm:spec_decode_num_"
DRAFTS = f"{PREFIX}drafts_total"
DRAFT_TOKENS = f"{PREFIX}draft_tokens_total"
ACCEPTED = f"{PREFIX}accepted_tokens_total"
PER_POSITION = f"{PREFIX}accepted_tokens_per_pos_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
GENERATED = "vllm:generation_tokens_total"
FINISHED = "vllm:request_success_total"
OTHER_COUNTERS = (PREFIX_QUERIES, PREFIX_HITS, GENERATED, FINISHED)

MOST_POSITIONS = 1024  # far above any draft; a damaged label would ask for a list of that length
POSITIONS = frozenset(str(position) for position in range(MOST_POSITIONS))
MOST_COUNTED = 2**53  # a page's floats count one by one up to here

Labels = tuple[tuple[str, str], ...]
Scrape = dict[tuple[str, Labels], float]


class MetricsError(MeasurementError):
    """A metrics page, or the difference of two, that can't be believed."""


def parse_metrics(text: str) -> Scrape:
    """Samples by name and labels.

    Raises MetricsError on a page that is no metrics page, and on one whose counters of ours are no counts.
    """
    found: Scrape = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                value = float(sample.value)
                if is_ours(sample.name):
                    _check_count(key, value)
                    if key in found:
                        raise MetricsError(f"{shown(key)} stands there twice, as if two pages were in one")
                found[key] = value
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise MetricsError(f"not a Prometheus page: {error}") from error
    if not found:
        raise MetricsError("not a Prometheus page: it holds no sample")
    return found


def is_ours(name: str) -> bool:
    """Whether a number here rests on the counter of that name."""
    return name in OTHER_COUNTERS or (name.startswith(PREFIX) and name.endswith("_total"))


def _check_count(key: tuple[str, Labels], value: float) -> None:
    if not (0 <= value <= MOST_COUNTED and value.is_integer()):
        raise MetricsError(f"{shown(key)} is {value:g}, which is no count: the page is damaged")
    position = dict(key[1]).get("position", "")
    if key[0] == PER_POSITION and position not in POSITIONS:
        raise MetricsError(f"{shown(key)}: {position!r} is no position in a draft: the page is damaged")


def shown(key: tuple[str, Labels]) -> str:
    """One sample's name and labels as a page writes them."""
    inside = ",".join(f'{label}="{value}"' for label, value in key[1])
    return f"{key[0]}{{{inside}}}"


def difference(before: Scrape, after: Scrape) -> Scrape:
    """What was counted between two scrapes, by counter.

    Raises MetricsError where a counter went backwards, or is in one of the two only.
    """
    result: Scrape = {}
    for key, value in after.items():
        name = key[0]
        if name.startswith(PREFIX) and name.endswith("_created") and before.get(key, value) != value:
            # A restarted engine can have passed its earlier count again; its birth date gives it away.
            raise MetricsError(f"{shown(key)} changed: the engine was restarted between the scrapes")
        if not is_ours(name):
            continue
        if key not in before:
            raise MetricsError(
                f"{shown(key)} is in the second scrape only: the first is cut off, or the engine joined "
                f"between the two, and all it ever counted would be taken for this stretch; take both while "
                f"the same engines serve"
            )
        was = before[key]
        if value < was:
            raise MetricsError(
                f"{shown(key)} went from {was:g} to {value:g}: the engine was restarted between the scrapes, "
                f"or they are swapped, the later one given as the first"
            )
        result[key] = value - was
    gone = next((key for key in before if is_ours(key[0]) and key not in after), None)
    if gone is not None:
        raise MetricsError(
            f"{shown(gone)} is gone from the second scrape: it is cut off, or the engine left; take both "
            f"while the same engines serve"
        )
    return result


def total(scrape: Scrape, name: str) -> float:
    """One counter, summed over every engine and model."""
    return sum(value for (sample, _), value in scrape.items() if sample == name)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over one stretch of serving. `per_position[j]` is how often draft j was accepted."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    @property
    def length(self) -> float:
        """Acceptance length, tokens per step: 1 without drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted draft tokens per draft token. Meaningful for a fixed k only."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None

    @property
    def position_rates(self) -> list[float]:
        """Share of drafts whose token at each position was accepted."""
        return [count / self.drafts for count in self.per_position] if self.drafts else []

    @property
    def conditional_rates(self) -> list[float]:
        """Share accepted at each position among the drafts that were accepted up to it."""
        return conditional(self.position_rates)

    @property
    def tokens_per_draft(self) -> float:
        """Draft tokens per draft: k where k is fixed."""
        return self.draft_tokens / self.drafts if self.drafts else 0.0

    def __add__(self, other: Acceptance) -> Acceptance:
        width = max(len(self.per_position), len(other.per_position))
        padded = [(*a.per_position, *(0,) * (width - len(a.per_position))) for a in (self, other)]
        return Acceptance(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            tuple(x + y for x, y in zip(*padded, strict=True)),
        )


NO_DRAFTS = Acceptance(0, 0, 0, ())


def conditional(rates: Sequence[float]) -> list[float]:
    """From P(accepted >= j) to P(accepted >= j | accepted >= j - 1), as far as there is anything left."""
    found, previous = [], 1.0
    for rate in rates:
        if previous <= 0:
            break
        found.append(rate / previous)
        previous = rate
    return found


def engines(scrape: Scrape) -> int:
    """How many engines count drafts in a scrape."""
    return sum(name == DRAFTS for name, _ in scrape)


def past_end_share(counted: Scrape) -> float | None:
    """Share of accepted draft tokens that lay behind the end of their answer, and reached nobody.

    Each finished request has one token from its prefill, and each step one that was no draft. What is
    missing from the generated tokens was cut off at a stop or at the limit. None without drafts or without
    the counters, or where a step without drafts makes the sum come out negative.
    """
    accepted, finished = total(counted, ACCEPTED), total(counted, FINISHED)
    if not accepted or not finished:
        return None
    cut = finished + total(counted, DRAFTS) + accepted - total(counted, GENERATED)
    return cut / accepted if cut >= 0 else None


def delivered_length(counted: Scrape) -> float | None:
    """Tokens per step that reached clients, behind each request's first; None without drafts or counters."""
    drafts, finished = total(counted, DRAFTS), total(counted, FINISHED)
    return (total(counted, GENERATED) - finished) / drafts if drafts and finished else None


def acceptance_between(before: Scrape, after: Scrape) -> Acceptance:
    """Acceptance between two scrapes. Raises MetricsError where the counters contradict one another."""
    result = _summed(difference(before, after))
    if sum(result.per_position) != result.accepted:
        raise MetricsError(
            f"{result.accepted} drafts were accepted, and {sum(result.per_position)} by position: "
            f"an engine is missing from one of the sums"
        )
    if max(result.per_position, default=0) > result.drafts:
        raise MetricsError(
            f"{max(result.per_position)} drafts were accepted at one position, of {result.drafts} in all: "
            f"an engine is missing from one of the sums"
        )
    return result


def _summed(counted: Scrape) -> Acceptance:
    by_position: dict[int, float] = {}
    for (name, labels), value in counted.items():
        if name == PER_POSITION:
            position = int(dict(labels)["position"])
            if not 0 <= position < MOST_POSITIONS:
                raise ValueError(f"position {position} is none of a draft's")
            by_position[position] = by_position.get(position, 0.0) + value
    return Acceptance(
        round(total(counted, DRAFTS)),
        round(total(counted, DRAFT_TOKENS)),
        round(total(counted, ACCEPTED)),
        tuple(round(by_position.get(j, 0.0)) for j in range(max(by_position, default=-1) + 1)),
    )
