"""One configuration, measured on one engine: boot, warm-up, every load level, accuracy, end.

One boot serves every measurement, since a boot costs more than all of them together on a small engine.
Each load level has prompts of its own and is framed by two scrapes of the engine's counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dspark_deploy.launch.command import served_name
from dspark_deploy.launch.engine import Engine, ReadyReport
from dspark_deploy.launch.rundir import RunDirectory
from dspark_deploy.preflight import Facts
from dspark_deploy.preflight.checkpoint import resolve
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.schema import SweepSettings
from tuning.acceptance import (
    NO_DRAFTS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    Acceptance,
    MetricsError,
    Scrape,
    acceptance_between,
    difference,
    parse_metrics,
    total,
)
from tuning.accuracy import AccuracyRun, complete, run_accuracy
from tuning.load import Load, LoadFailedError, LoadResult, run_load
from tuning.workload import TinyArithmetic

LOAD_TIMEOUT_S = 1800
DYING_S = 1.0
REQUEST_TIMEOUT_S = 600
# More than this share of a load's prompt tokens found in the prefix cache, and TTFT means something else.
PREFIX_HIT_LIMIT = 0.01

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadMeasurement:
    """One load level: what the client saw, and what the engine counted meanwhile."""

    result: LoadResult
    acceptance: Acceptance
    prefix_hit_rate: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything measured on one engine. `seconds` by phase; the accuracy items have a file of their own."""

    loads: list[LoadMeasurement]
    accuracy_acceptance: Acceptance
    accuracy: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance pooled over the load levels."""
        return sum((load.acceptance for load in self.loads), NO_DRAFTS)

    def as_json(self) -> dict[str, Any]:
        """The measurement as plain JSON values, which `from_json` takes back."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Measurement:
        """What `as_json` gave, after a round trip through JSON."""
        loads = [
            LoadMeasurement(
                LoadResult(**load["result"]), _acceptance(load["acceptance"]), load["prefix_hit_rate"]
            )
            for load in document["loads"]
        ]
        return cls(
            loads, _acceptance(document["accuracy_acceptance"]), document["accuracy"], document["seconds"]
        )


def _acceptance(document: dict[str, Any]) -> Acceptance:
    return Acceptance(**{**document, "per_position": tuple(document["per_position"])})


def measure(
    loaded: LoadedProfile,
    facts: Facts,
    settings: SweepSettings,
    workload: TinyArithmetic,
    folder: Path,
    say: Say,
) -> tuple[Measurement, AccuracyRun, ReadyReport]:
    """Measure one configuration. Raises EngineError or MeasurementError."""
    profile = loaded.profile
    seconds: dict[str, float] = {}
    started = time.monotonic()
    say("booting the engine")
    with Engine.start(loaded, facts, RunDirectory(folder), []) as engine:
        ready = engine.wait_ready()
        seconds["boot"] = time.monotonic() - started
        with httpx.Client(base_url=engine.url, timeout=REQUEST_TIMEOUT_S) as client:
            widest = max(settings.loads)
            timed = _Stopwatch(seconds)
            with timed("warm-up"):
                say("warming up")
                _warm_up(client, served_name(profile), workload.warm_up_prompts(2 * widest), widest, settings)
            loads = []
            for index, concurrency in enumerate(settings.loads):
                say(f"load {concurrency}")
                with timed(f"load {concurrency}"):
                    load = Load(
                        concurrency,
                        workload.load_prompts(index, max(settings.prompts_per_load, concurrency)),
                        settings.output_tokens,
                        settings.temperature,
                    )
                    loads.append(_measure_load(engine, client, load, loaded, facts, folder))
            say(f"accuracy, {settings.accuracy_problems} problems")
            with timed("accuracy"):
                before = _scrape(engine, client)
                answers = run_accuracy(
                    workload.questions(settings.accuracy_problems),
                    workload.answer,
                    client=client,
                    model=served_name(profile),
                    max_tokens=settings.output_tokens,
                    concurrency=widest,
                )
                accuracy_acceptance = acceptance_between(before, _scrape(engine, client))
        stopping = time.monotonic()
    seconds["stop"] = time.monotonic() - stopping
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    return Measurement(loads, accuracy_acceptance, answers.counts(), rounded), answers, ready


class _Stopwatch:
    """`with timed("phase"):` adds the seconds to a table."""

    def __init__(self, table: dict[str, float]) -> None:
        self._table = table
        self._phase = ""
        self._started = 0.0

    def __call__(self, phase: str) -> _Stopwatch:
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._table[self._phase] = time.monotonic() - self._started


def _warm_up(
    client: httpx.Client, model: str, prompts: list[str], concurrency: int, settings: SweepSettings
) -> None:
    """Send prompts that nothing else uses, as many at a time as the heaviest load will be."""
    with ThreadPoolExecutor(concurrency) as pool:
        for answer in pool.map(lambda p: complete(client, model, p, settings.output_tokens), prompts):
            del answer


def _measure_load(
    engine: Engine, client: httpx.Client, load: Load, loaded: LoadedProfile, facts: Facts, folder: Path
) -> LoadMeasurement:
    before = _scrape(engine, client)
    try:
        result = run_load(
            load,
            url=engine.url,
            model=served_name(loaded.profile),
            tokenizer=resolve(loaded.profile.model.path),
            distribution=facts.vllm_distribution,
            folder=folder / f"load-{load.concurrency}",
            timeout_s=LOAD_TIMEOUT_S,
        )
    except LoadFailedError:
        engine.check_alive()  # a dead engine is the better explanation
        raise
    after = _scrape(engine, client)
    counted = difference(before, after)
    queries = total(counted, PREFIX_QUERIES)
    hit_rate = total(counted, PREFIX_HITS) / queries if queries else 0.0
    if hit_rate > PREFIX_HIT_LIMIT:
        raise LoadFailedError(
            f"{hit_rate:.1%} of the prompt tokens at load {load.concurrency} came from the prefix cache: "
            f"its times are not those of fresh prompts. Set engine.args.enable-prefix-caching to false"
        )
    return LoadMeasurement(result, acceptance_between(before, after), hit_rate)


def _scrape(engine: Engine, client: httpx.Client) -> Scrape:
    engine.check_alive()
    try:
        response = client.get("/metrics")
        response.raise_for_status()
    except httpx.HTTPError as error:
        time.sleep(DYING_S)  # an engine that is just dying is the better explanation
        engine.check_alive()
        raise MetricsError(f"the engine does not answer /metrics: {error}") from error
    return parse_metrics(response.text)
