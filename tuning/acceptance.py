"""Acceptance from the engine's own counters: two scrapes of `/metrics`, differenced, summed over engines.

    dspark-tune acceptance --before A.prom --after B.prom

    acceptance length   1 + accepted / drafts         tokens that one step yields, pooled over all steps
    per position        accepted at position j / drafts
    conditional         accepted at j / accepted at j - 1

The identity `acceptance length = 1 + sum(per position)` holds for whole scrapes; where it does not, an
engine was left out of a sum or restarted between the scrapes, and `Acceptance` refuses to be made.
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

MOST_POSITIONS = 1024  # far above any draft; a damaged label would ask for a list of that length

Labels = tuple[tuple[str, str], ...]
Scrape = dict[tuple[str, Labels], float]


class MetricsError(MeasurementError):
    """A metrics page, or the difference of two, that can't be believed."""


def parse_metrics(text: str) -> Scrape:
    """Counter samples by name and labels. Raises MetricsError on a page that is no metrics page."""
    found: Scrape = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name, tuple(sorted(sample.labels.items()))] = float(sample.value)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise MetricsError(f"not a Prometheus page: {error}") from error
    return found


def difference(before: Scrape, after: Scrape) -> Scrape:
    """What was counted between two scrapes. Raises MetricsError where a counter went backwards."""
    result: Scrape = {}
    for key, value in after.items():
        name, labels = key
        change = value - before.get(key, 0.0)
        if name.startswith(PREFIX) and name.endswith("_created") and key in before and change:
            # A restarted engine can have passed its earlier count again; its birth date gives it away.
            raise MetricsError(f"{name}{dict(labels)} changed: the engine was restarted between the scrapes")
        if change < 0 and name.endswith("_total"):
            was = before.get(key, 0.0)
            raise MetricsError(
                f"{name}{dict(labels)} went from {was:g} to {value:g}: the engine was restarted"
            )
        result[key] = change
    missing = [name for name, _ in before.keys() - after.keys() if name.startswith(PREFIX)]
    if missing:
        raise MetricsError(f"{missing[0]} of an engine is gone from the second scrape")
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
    counted = difference(before, after)
    try:
        result = _summed(counted)
    except (ValueError, OverflowError, KeyError) as error:
        raise MetricsError(f"the engine's counters can't be read: {error!r}") from error
    if sum(result.per_position) != result.accepted:
        raise MetricsError(
            f"{result.accepted} drafts were accepted, and {sum(result.per_position)} by position: "
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
