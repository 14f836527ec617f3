"""What a record's `result` holds, by kind: the fields that a reader, the report and `compare` rest on.

A record is read long after it was written, and by hand-made tools: a number that is none, or a field that is
missing, must not become an empty cell of a page. Further fields are taken as they are, if their numbers are
finite. The published schema has the same.

Not covered: whether the numbers of one record agree with one another, which is for who makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark_deploy.validation import fault_lines

Share = Annotated[float, Field(ge=0, le=1)]
Length = Annotated[float, Field(ge=1, description="acceptance length, tokens per step")]
Counted = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]


class Part(BaseModel):
    """Base: strict types, finite numbers, further fields allowed."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Bounds(Part):
    """A 95 % interval."""

    low: float
    high: float


class Verdict(Part):
    """What is wrong with an acceptance."""

    name: str
    message: str
    remedy: str


class Acceptance(Part):
    """Of `acceptance`."""

    acceptance_length: Length
    drafts: Counted
    per_position: list[Share] | None
    verdicts: list[Verdict]


class Reading(Part):
    """Right answers by one reading."""

    share: Share
    interval: Bounds


class Gsm8k(Part):
    """Of `gsm8k run` and `gsm8k score`; no accuracy where the run is void."""

    protocol: str
    reading: str
    data_pinned: bool | None = Field(description="null where the data weren't at hand")
    void: list[str]
    accuracy: Share | None
    accuracy_interval: Bounds | None
    strict: Reading
    flexible: Reading
    counts: dict[str, Counted]


class BeforeAfter(Part):
    """Accuracy of two runs."""

    before: Share
    after: Share


class Pairs(Part):
    """Two runs over the same questions."""

    questions: Counted
    gained: Counted
    lost: Counted
    difference: float
    interval: Bounds
    p_value: Share


class Power(Part):
    """What so many questions could see."""

    smallest_significant_loss: float | None
    loss_seen_8_of_10: float | None
    equal_pair_passes: Share


class Comparison(Part):
    """Of `compare` and `accuracy-gate`, and of each arm of `measure`."""

    verdict: Literal["pass", "fail", "inconclusive"]
    margin: Share
    accuracy: BeforeAfter
    comparison: Pairs
    null: Pairs | None
    power: Power


class Beginning(Part):
    """One prompt's first tokens."""

    tokens: list[str]
    logprobs: list[float]


class Drift(Part):
    """Two passes over the same prompts."""

    prompts: Counted
    differing: Counted
    interval: Bounds


class GreedyBeginnings(Part):
    """Of `divergence --out`."""

    prompts_sha256: str
    passes: list[list[Beginning]] = Field(min_length=2, max_length=2)
    within: Drift


class Divergence(Part):
    """Of `divergence A B`."""

    within: list[Drift] = Field(min_length=2, max_length=2)
    across: Drift


class Prediction(Part):
    """One k at one load."""

    k: Counted
    concurrency: Counted
    acceptance_length: Length
    step_ms: Amount
    tpot_ms: Amount


class PredictionError(Part):
    """A prediction beside what was measured."""

    k: Counted
    concurrency: Counted
    acceptance_length_measured: Length
    acceptance_length_error: float
    tpot_ms_measured: Amount
    tpot_error: float


class Predict(Part):
    """Of `predict`."""

    from_k: Counted
    predictions: list[Prediction]
    errors: list[PredictionError]


class KernelRow(Part):
    """One operator's output by one provider; null where the output is NaN."""

    operator: str
    variant: str
    output: str
    provider: str
    nrmse: dict[str, Amount | None]


class Kernels(Part):
    """Of `kernels`."""

    hidden: Counted
    streams: Counted
    tokens: list[Counted]
    devices: list[str]
    table: list[KernelRow]


class Spread(Part):
    """Milliseconds over requests."""

    mean: Amount
    mean_interval: Bounds
    p50: Amount
    p90: Amount
    p99: Amount
    p99_interval: Bounds | None


class LevelAcceptance(Part):
    """Of one load level."""

    length: Length


class ValidLevel(Part):
    """A load level with numbers."""

    valid: Literal[True]
    level: str
    boot: Counted
    requests: Counted
    ttft_ms: Spread
    tpot_ms: Spread
    chunk_gap_ms: dict[str, Any]
    tokens_per_s_per_user: Amount | None
    output_tokens_per_s: Amount
    output_tokens_per_s_per_gpu: Amount | None
    goodput_per_s: Amount | None
    acceptance: LevelAcceptance
    notes: list[str]
    tpot_ms_by_request: list[Amount | None]


class InvalidLevel(Part):
    """A load level that is no measurement."""

    valid: Literal[False]
    level: str
    boot: Counted
    reasons: list[str]


class OverBoots(Part):
    """One level over whole boots."""

    level: str
    tpot_ms: Amount
    interval: Bounds | None


class ArmAcceptance(Part):
    """Of one arm, over its levels."""

    length: Length
    drafts: Counted
    per_position: list[Share] | None


class MeasuredArm(Part):
    """An arm with at least one level that is valid."""

    arm: str
    state: Literal["complete"]
    loads: list[Annotated[ValidLevel | InvalidLevel, Field(discriminator="valid")]]
    over_boots: list[OverBoots]
    acceptance: ArmAcceptance | None
    accuracy: dict[str, Counted]


class FailedArm(Part):
    """An arm without numbers."""

    arm: str
    state: Literal["failed"]
    reason: str


class ArmVerdict(Verdict):
    """What is wrong with an arm's acceptance."""

    arm: str


class Measure(Part):
    """Of `measure`."""

    ranks_k: bool
    boots: Counted
    arms: list[Annotated[MeasuredArm | FailedArm, Field(discriminator="state")]]
    accuracy_margin: Share
    against_reference: dict[str, Comparison]
    verdicts: list[ArmVerdict]


RESULTS: dict[str, type[Part]] = {
    "measure": Measure,
    "acceptance": Acceptance,
    "gsm8k": Gsm8k,
    "compare": Comparison,
    "greedy-beginnings": GreedyBeginnings,
    "divergence": Divergence,
    "predict": Predict,
    "kernels": Kernels,
}


def result_faults(kind: str, result: dict[str, Any]) -> list[str]:
    """What is wrong with the result of a record, one line each; empty where it is sound."""
    try:
        RESULTS[kind].model_validate(result)
    except ValidationError as error:
        return [f"result.{line}" for line in fault_lines(error)]
    return [
        f"{place}: {value} is no number" for place, value in _numbers(result, "result") if not _finite(value)
    ]


def _finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield place, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{place}.{key}")
