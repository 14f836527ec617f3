"""Synthetic acceptance: drafts are committed whatever the target says, so the text means nothing.

It measures the system's step time, and is good for nothing else: never serving, never accuracy. A forced
length belongs to the k that it was measured at, and adaptive verification would cut below it unseen.

Published lengths are those of InferenceX's golden curves (SPEED-Bench coding, temperature 1, thinking on):
dsv4-pro-0813-dspark for k = 1 to 8, and DeepSeek-V4.1-Flash for k = 5. A public result was withdrawn for a
length of another k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dspark_deploy.preflight.findings import Finding, Severity
from dspark_deploy.profile.flags import parse_flags
from dspark_deploy.profile.schema import ArgValue

METHOD = "synthetic"
LENGTH, RATES = "synthetic_acceptance_length", "synthetic_acceptance_rates"
GOLDEN: tuple[tuple[int, float], ...] = (
    *((1, 1.84), (2, 2.51), (3, 3.01), (4, 3.36), (5, 3.61), (6, 3.77), (7, 3.73), (8, 3.47)),
    (5, 3.51),
)
NEAR = 0.03
FLAG = "speculative-config"
SHORTEST = len("spec")  # `--s` and the like are many flags' beginning
SOURCE = "InferenceX golden_al_distribution"


def synthetic_faults(
    config: Mapping[str, Any], task: Literal["serve", "accuracy", "bench"], measured_k: int | None = None
) -> list[Finding]:
    """What is wrong with a `--speculative-config` that forces acceptance; nothing for one that doesn't.

    `measured_k` is the k at which the forced length was measured, where that is known; else a length that
    stands in the published curves is held to the k that it stands at.
    """
    if config.get("rejection_sample_method") != METHOD:
        return []
    given, length, rates = config.get("num_speculative_tokens"), config.get(LENGTH), config.get(RATES)
    found = []
    numbers = isinstance(given or 0, int) and isinstance(length or 0.0, int | float)
    if not numbers or not isinstance(rates or [], list):
        found.append(
            _fault(
                "SYNTHETIC_UNREADABLE",
                f"synthetic acceptance with num_speculative_tokens {given!r}, length {length!r} and "
                f"rates {rates!r}",
                "k is a whole number, the length a number, the rates a list of numbers",
            )
        )
        length = rates = None
    k = given if isinstance(given, int) else 0
    if task != "bench":
        found.append(
            _fault(
                "SYNTHETIC_IN_SERVING" if task == "serve" else "SYNTHETIC_IN_ACCURACY",
                "synthetic acceptance commits drafts whatever the target says: the text is meaningless",
                "take it out; rejection_sample_method is standard or block",
            )
        )
    if config.get("enable_adaptive_verification"):
        found.append(
            _fault(
                "SYNTHETIC_WITH_ADAPTIVE",
                "adaptive verification cuts drafts that synthetic acceptance counts as accepted",
                "set verification to fixed for a bench with forced acceptance",
            )
        )
    if rates is not None and len(rates) != k:
        found.append(
            _fault(
                "SYNTHETIC_AL_NOT_FOR_THIS_K", f"{len(rates)} rates for k = {k}", "give one rate a position"
            )
        )
    if length is None:
        return found
    if not 1 <= length <= k + 1:
        found.append(
            _fault(
                "SYNTHETIC_AL_OUT_OF_RANGE",
                f"a forced acceptance length of {length} at k = {k} must lie in [1, {k + 1}]",
                "use the length measured at this k",
            )
        )
        return found
    belongs = {measured_k} if measured_k else {at for at, golden in GOLDEN if abs(golden - length) <= NEAR}
    if belongs and k not in belongs:
        ks = " or ".join(str(at) for at in sorted(belongs))
        found.append(
            _fault(
                "SYNTHETIC_AL_NOT_FOR_THIS_K",
                f"a forced acceptance length of {length} was measured at k = {ks}, and this is k = {k}",
                "use the length measured at this k",
            )
        )
    return found


def config_of_flags(flags: Sequence[str]) -> dict[str, Any]:
    """The speculative config of a command line: `--speculative-config JSON`, or its keys behind dots."""
    return config_of_args(parse_flags(flags).args)


def config_of_args(args: Mapping[str, ArgValue]) -> dict[str, Any]:
    """The same of flags as `engine.args` has them. What is no JSON object is left to vLLM's own error."""
    found: dict[str, Any] = {}
    for name, value in args.items():
        # vLLM's parser takes a flag that is cut short, as long as it is one flag's beginning.
        spelt = len(name) > SHORTEST and FLAG.startswith(name)
        if spelt and isinstance(value, dict):
            found |= {key.replace("-", "_"): inner for key, inner in value.items()}
    return found


def _fault(code: str, message: str, remedy: str) -> Finding:
    return Finding(code, Severity.ERROR, message, remedy, "", SOURCE)
