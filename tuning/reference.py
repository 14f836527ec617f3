"""What every answer of a sweep is compared with: torch's mHC without speculation, where it can be had.

A kernel that computes wrong numbers gives the same wrong answers with and without speculation, so comparing
with no speculation on the same kernels misses it: GSM8K fell from 91.1 % to 23.7 % by such a kernel
(vllm#56342). Where the model has mHC and its provider can be chosen, one engine more is booted, whose mHC is
vLLM's torch reference, and no speculation on the profile's own kernels is held against it like all others.
Elsewhere no speculation is the reference itself.

    sweep: {torch_reference: false}      leaves that engine out
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark_deploy.errors import MeasurementError
from dspark_deploy.preflight import Facts
from dspark_deploy.preflight.rules.context import DEEPSEEK_V4, family
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.schema import SweepSettings
from tuning.measurement import Measurement
from tuning.space import ANSWERS, REFERENCE, Configuration, examine
from tuning.statistics import fewest_questions

TORCH = REFERENCE.having("mhc_provider", "torch").having(ANSWERS, 1)


@dataclass(frozen=True, slots=True)
class Reference:
    """The configuration whose answers all others are compared with, and why it is that one."""

    configuration: Configuration
    why: str

    @property
    def is_torch(self) -> bool:
        """Whether it is an engine beside the search."""
        return self.configuration == TORCH


def find_reference(loaded: LoadedProfile, facts: Facts) -> Reference:
    """The reference of a sweep of this profile on this machine."""

    def none(why: str) -> Reference:
        return Reference(REFERENCE, f"no speculation, {why}")

    if family(loaded, facts) not in DEEPSEEK_V4:
        return none("since the model has no mHC")
    if loaded.profile.hardware.platform == "cuda":
        return none("since vLLM's CUDA models have no choice of mHC provider")
    if loaded.profile.mhc.provider == "torch":
        return none("whose mHC is torch's by the profile")
    if not loaded.profile.sweep.torch_reference:
        return none("by sweep.torch_reference: a fault of the kernels themselves is not seen")
    refused, _ = examine(TORCH, loaded, facts)
    if refused is not None:
        return none(f"since torch's mHC can't be served here: {', '.join(refused.codes)}: {refused.reason}")
    return Reference(TORCH, "no speculation with torch's mHC")


def too_few_questions(settings: SweepSettings) -> str:
    """What is to be said before any boot where no comparison can come out well; empty where one can."""
    fewest = fewest_questions(settings.accuracy_margin)
    if settings.accuracy_problems >= fewest:
        return ""
    return (
        f"accuracy: {settings.accuracy_problems} questions can't show a loss below "
        f"{settings.accuracy_margin:.1%}, even where no answer is lost, so no speculation will be chosen; "
        f"ask {fewest} or more with --accuracy-problems, or allow more with --accuracy-margin"
    )


def without_reference(reason: str) -> MeasurementError:
    """What ends a sweep whose no speculation has no measurement."""
    return MeasurementError(
        f"there is nothing to compare with: without speculation, {reason}. Mend it and use --retry-failed"
    )


def reference_json(reference: Reference, measurement: Measurement | None) -> dict[str, Any]:
    """The reference in a result; measured beside the search, with its TPOT in ms at `concurrency`."""
    found: dict[str, Any] = {"configuration": reference.configuration.unmarked.label, "why": reference.why}
    if measurement is not None:
        load = measurement.loads[0].result
        found |= {"accuracy_counts": measurement.accuracy, "concurrency": load.concurrency}
        found["tpot_ms"] = load.mean_tpot_ms
    return found
