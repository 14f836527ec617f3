"""Cost before truth: which numbers of speculative tokens are worth a measurement, by prediction.

    acceptance length   of every k, from the largest k, which is measured like any point of the space
    step time           at the largest k from the same run, at a few smaller k under synthetic acceptance,
                        without speculation from the reference; straight lines between
    TPOT                step time / (acceptance length x delivered), see `judging.prediction`

The best predicted k is measured with every other setting; then, in whatever family was fastest, the k that
are predicted to be within `SLACK` of it at the goal's load. The rest is pruned, with its prediction as the
reason. A prediction orders and prunes; it is never a result. What is left answers the sweep's own goal: the
profiles for the other goals are the best of what was measured for this one.

Not covered: the staircase of captured graph sizes between two k that were run, and adaptive verification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuning.acceptance import NO_DRAFTS, Acceptance
from tuning.judging.prediction import predicted_lengths
from tuning.measurement import Measurement
from tuning.space import PROBE, VERIFICATION, Configuration, Space

SLACK = 0.05
MOST_CLOSE = 3
PROBE_REQUESTS = 16
SYNTHETIC_RUN = "synthetic"


@dataclass(frozen=True, slots=True)
class Screen:
    """Predicted TPOT in milliseconds by (k, load), k = 0 being measured; and how it came about."""

    tpot_ms: dict[tuple[int, int], float]
    from_k: int
    stepped: tuple[int, ...]

    def excess(self, k: int, load: int) -> float:
        """By which share the TPOT of k is predicted to be above the best at this load."""
        best = min(value for (other, at), value in self.tpot_ms.items() if at == load and other)
        return self.tpot_ms[k, load] / best - 1


def family(configuration: Configuration) -> Configuration:
    """Everything about a configuration but its k."""
    return Configuration(1, configuration.draft_sample_method, configuration.unmarked.others)


def first_family(space: Space) -> list[Configuration]:
    """The configurations that differ by k alone from the first that speculates with fixed verification."""
    speculating = [
        cell
        for cell in space.cells
        if cell.num_speculative_tokens and cell.other(VERIFICATION) in (None, "fixed")
    ]
    return [cell for cell in speculating if family(cell) == family(speculating[0])] if speculating else []


def probes(space: Space) -> tuple[Configuration, list[Configuration]] | None:
    """The largest k, and the synthetic runs at a few smaller; None where k is no choice."""
    members = sorted(first_family(space), key=lambda cell: cell.num_speculative_tokens)
    if len(members) < 3:
        return None
    *smaller, largest = members
    stepped = {0, len(smaller) // 2}
    return largest, [smaller[index].having(PROBE, SYNTHETIC_RUN) for index in sorted(stepped)]


def step_ms(measurement: Measurement) -> dict[int, float]:
    """Mean time of a step by load, milliseconds: the gap between chunks, which are steps."""
    found = {}
    for load in measurement.loads:
        gaps = load.summary.get("chunk_gap_ms") or {}
        if "mean" in gaps:
            found[load.result.concurrency] = float(gaps["mean"])
    return found


def delivered_share(measurement: Measurement) -> float:
    """Share of the counted tokens per step that reached clients; 1 where the engine doesn't tell."""
    told = [
        (load.summary.get("acceptance", {}).get("delivered_length"), load.acceptance)
        for load in measurement.loads
    ]
    known = [(length, counted) for length, counted in told if length]
    emitted = sum(length * counted.drafts for length, counted in known)
    whole = sum(counted.length * counted.drafts for _, counted in known)
    return emitted / whole if whole else 1.0


def screen(
    reference: Measurement,
    largest: Measurement,
    synthetic: Mapping[int, Measurement],
    ks: Sequence[int],
    loads: Sequence[int],
) -> Screen | None:
    """Predict every k at every load; None where a run has no step times, so that nothing can be pruned."""
    counted: Acceptance = sum((load.acceptance for load in largest.loads), NO_DRAFTS)
    lengths = predicted_lengths(counted, ks)
    delivered = delivered_share(largest)
    runs = {0: step_ms(reference), max(ks): step_ms(largest)}
    runs |= {k: step_ms(measurement) for k, measurement in synthetic.items()}
    if any(load not in steps for steps in runs.values() for load in loads):
        return None
    known = sorted(runs)
    tpot = {(0, load.result.concurrency): load.result.mean_tpot_ms for load in reference.loads}
    for load in loads:
        values = [runs[k][load] for k in known]
        for k in ks:
            tpot[k, load] = float(np.interp(k, known, values)) / (lengths[k] * delivered)
    return Screen(tpot, max(ks), tuple(sorted(synthetic)))


def wanted_ks(found: Screen, ks: Sequence[int], load: int) -> list[int]:
    """The k worth measuring for a goal at `load`, best prediction first."""
    ranked = sorted(ks, key=lambda k: found.tpot_ms[k, load])
    return [k for k in ranked if found.excess(k, load) <= SLACK][:MOST_CLOSE]


def first_stage(space: Space, found: Screen, load: int) -> list[Configuration]:
    """What is measured first: the best predicted k of every family, and all that no prediction is about."""
    ks = _ks(space)
    best = wanted_ks(found, ks, load)[0]
    return [c for c in space.cells if c.num_speculative_tokens == best or c.num_speculative_tokens not in ks]


def second_stage(
    space: Space, found: Screen, load: int, measured: Mapping[Configuration, Measurement]
) -> list[Configuration]:
    """What is measured then: every close k in the family that was fastest at the goal's load.

    Families are compared at the same k: the largest one was measured for its acceptance, in one family alone.
    """
    tpot = {
        cell: next(m.result.mean_tpot_ms for m in measured[cell].loads if m.result.concurrency == load)
        for cell in first_stage(space, found, load)
        if cell.num_speculative_tokens and cell in measured
    }
    if not tpot:
        return []
    fastest = family(min(tpot, key=lambda cell: tpot[cell]))
    close = wanted_ks(found, _ks(space), load)
    return [c for c in space.cells if c.num_speculative_tokens in close and family(c) == fastest]


def _ks(space: Space) -> list[int]:
    return sorted({cell.num_speculative_tokens for cell in first_family(space)})


def pruned(
    space: Space, launched: Sequence[Configuration], found: Screen, load: int
) -> dict[Configuration, str]:
    """Why configurations were not measured."""
    reasons = {}
    close = wanted_ks(found, _ks(space), load)
    for cell in space.cells:
        k = cell.num_speculative_tokens
        if cell not in launched and (k, load) in found.tpot_ms:
            if k in close:
                why = (
                    "close to the best prediction, but other settings were faster, or the trials were used up"
                )
            elif found.excess(k, load) <= SLACK:
                why = f"close to the best prediction, but {MOST_CLOSE} other k are closer"
            else:
                why = f"{found.excess(k, load):.0%} above the best prediction"
            reasons[cell] = f"predicted TPOT {found.tpot_ms[k, load]:.2f} ms at load {load}, {why}"
    return reasons
