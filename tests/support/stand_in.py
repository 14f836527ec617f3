"""A stand-in for booting and measuring an engine: known step times and acceptance, of fixed cost.

    engine = StandIn(cost_s=0.2)
    Campaign(loaded, facts, folder, options, console, engine)
    engine.launched        labels of what was booted, in order
    engine.asked           plan and vLLM flags of the last boot, by label

    step time      base_ms + token_ms * (k + 1) * load, milliseconds; `slower` scales it by configuration
    acceptance     `chances[j]` to accept draft j, given those before
    TPOT           step time / acceptance length, with noise by prompt and by boot

`breaks` maps a label to the errors that its boots end in, first boot first; when they are used up, it works.
What it gives out is made up, and good only for testing what is done with measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark_deploy.launch.engine import ReadyReport
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from tuning.acceptance import NO_DRAFTS, Acceptance
from tuning.accuracy import AccuracyRun, Item
from tuning.load import LoadResult
from tuning.measurement import LoadMeasurement, Measurement, Plan

DRAFTS = 10_000


@dataclass
class StandIn:
    """See the module."""

    chances: Sequence[float] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
    base_ms: float = 10.0
    token_ms: float = 0.5
    cost_s: float = 0.0
    noise: float = 0.01
    boot_noise: float = 0.0
    right: int = 90
    wrong_for: dict[str, int] = field(default_factory=dict)
    slower: Callable[[LoadedProfile], float] = lambda loaded: 1.0
    breaks: dict[str, list[Exception]] = field(default_factory=dict)
    log_text: str = ""
    launched: list[str] = field(default_factory=list)
    asked: dict[str, tuple[Plan, list[str]]] = field(default_factory=dict)
    profiles: list[LoadedProfile] = field(default_factory=list)

    def length(self, k: int) -> float:
        """The acceptance length at k."""
        return float(1 + np.cumprod(self.chances[:k]).sum())

    def step_ms(self, k: int, load: int, loaded: LoadedProfile) -> float:
        """The time of one step."""
        return (self.base_ms + self.token_ms * (k + 1) * load) * self.slower(loaded)

    def tpot_ms(self, k: int, load: int, loaded: LoadedProfile) -> float:
        """The time per output token."""
        return self.step_ms(k, load, loaded) / self.length(k)

    def __call__(
        self,
        loaded: LoadedProfile,
        facts: Facts,
        plan: Plan,
        workload: Any,
        folder: Path,
        say: Any,
        extra: Sequence[str] = (),
    ) -> tuple[Measurement, AccuracyRun, ReadyReport]:
        label = folder.name
        self.launched.append(label)
        self.profiles.append(loaded)
        self.asked[label] = (plan, list(extra))
        say("booting the engine")
        (folder / "engine.log").write_text(self.log_text)
        time.sleep(self.cost_s)
        if self.breaks.get(label):
            raise self.breaks[label].pop(0)
        speculative = loaded.profile.speculative
        k = speculative.num_speculative_tokens if speculative else 0
        # Boots of one round have the machine's mood in common, as neighbours in time have.
        mood = np.random.default_rng(plan.repeat).normal(0, self.boot_noise) if plan.repeat else 0.0
        loads = [self._load(k, load, loaded, plan, 1 + mood) for load in plan.loads]
        run = self._answers(label, plan.accuracy_problems)
        counts = run.counts() if run.items else {"questions": 0, "correct": 0}
        seconds = {"boot": self.cost_s}
        measured = Measurement(loads, NO_DRAFTS, counts, seconds)
        return measured, run, ReadyReport("http://stand-in", self.cost_s, [])

    def _load(self, k: int, load: int, loaded: LoadedProfile, plan: Plan, factor: float) -> LoadMeasurement:
        random = np.random.default_rng(load + 1000 * plan.repeat)
        tpot = self.tpot_ms(k, load, loaded) * factor
        values = list(map(float, tpot * (1 + random.normal(0, self.noise, plan.requests))))
        positions = tuple(round(DRAFTS * share) for share in np.cumprod(self.chances[:k]))
        counted = Acceptance(DRAFTS, DRAFTS * k, sum(positions), positions) if k else NO_DRAFTS
        result = LoadResult(
            load, plan.requests, 1.0, 100, load * 1000 / float(np.mean(values)), [20.0] * len(values), values
        )
        step = self.step_ms(k, load, loaded) * factor
        return LoadMeasurement(result, counted, 0.0, {"chunk_gap_ms": {"mean": step}})

    def _answers(self, label: str, questions: int) -> AccuracyRun:
        right = questions * (self.right - self.wrong_for.get(label, 0)) // 100
        return AccuracyRun(
            [
                Item(f"q{i}", "1", "1" if i < right else "2", i < right, "answered", f"answer {i < right}")
                for i in range(questions)
            ]
        )
