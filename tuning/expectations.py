"""What a profile's `expect` says of a measurement: which ranges hold for it, and what fell outside.

    expect:
      - workload: random
        num_speculative_tokens: 5
        concurrency: 1
        tpot_ms: [7.5, 10.5]
        source: vllm#56342

An expectation that names a temperature or thinking holds only where the measurement is known to have had it.
A miss is a sentence for people, not a verdict: a range is somebody else's measurement, on another day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dspark_deploy.profile.schema import Expectation


@dataclass(frozen=True, slots=True)
class Observed:
    """What was measured, of one configuration on one workload. None is not measured, or not comparable.

    `k` is 0 without speculation; `tpot_ms` maps requests in flight to mean milliseconds.
    """

    label: str
    workload: str
    k: int
    temperature: float | None = None
    thinking: bool | None = None
    acceptance_length: float | None = None
    accuracy: float | None = None
    tpot_ms: Mapping[int, float] = field(default_factory=dict)


def holding(expectations: Sequence[Expectation], observed: Observed) -> list[Expectation]:
    """The expectations that hold for what was measured. `gsm8k` holds for each of its protocols."""
    return [
        each
        for each in expectations
        if each.workload in (observed.workload, observed.workload.partition("/")[0])
        and each.num_speculative_tokens in (None, observed.k)
        and each.temperature in (None, observed.temperature)
        and each.thinking in (None, observed.thinking)
    ]


def missed(expectations: Sequence[Expectation], observed: Observed) -> list[str]:
    """What fell outside, as sentences."""
    sentences = []
    for each in holding(expectations, observed):
        pairs = [
            ("acceptance length", observed.acceptance_length, each.acceptance_length),
            ("accuracy", observed.accuracy, each.accuracy),
        ]
        if each.concurrency is not None:
            name = f"TPOT in ms at load {each.concurrency}"
            pairs.append((name, observed.tpot_ms.get(each.concurrency), each.tpot_ms))
        for name, value, limits in pairs:
            if limits and value is not None and not limits[0] <= value <= limits[1]:
                source = f" ({each.source})" if each.source else ""
                expected = f"{limits[0]:g} to {limits[1]:g}{source}"
                sentences.append(f"{observed.label}: {name} {value:.3f} is outside the expected {expected}")
    return sentences
