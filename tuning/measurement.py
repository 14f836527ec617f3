"""One configuration, measured on one engine: boot, warm-up, every load level, accuracy, end.

One boot serves every measurement, since a boot costs more than all of them together on a small engine.
Each load level has prompts of its own and is framed by two scrapes of the engine's counters; before it the
prefix cache is emptied, where the engine lets us. `dspark-tune sweep` and `dspark-tune measure` both measure
by this; a sweep stops at a level that is no clean measurement, `measure` says so and goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark_deploy.errors import InputError, MeasurementError
from dspark_deploy.launch.command import capture_sizes, served_name
from dspark_deploy.launch.engine import Engine, ReadyReport
from dspark_deploy.launch.rundir import RunDirectory
from dspark_deploy.preflight import Facts
from dspark_deploy.preflight.checkpoint import resolve
from dspark_deploy.preflight.synthetic import config_of_flags, synthetic_faults
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.schema import Profile, SweepSettings
from tuning.acceptance import (
    NO_DRAFTS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    Acceptance,
    MetricsError,
    Scrape,
    acceptance_between,
    delivered_length,
    difference,
    past_end_share,
    total,
)
from tuning.accuracy import AccuracyRun, AccuracyVoidError, greedy, run_accuracy
from tuning.conditions import snapshot, throttled
from tuning.endpoint import Endpoint, Sampling
from tuning.load import Load, LoadFailedError, LoadResult, run_load
from tuning.summary import acceptance_summary, load_summary
from tuning.workload import Workload

LOAD_TIMEOUT_S = 1800
DYING_S = 1.0
# More than this share of a load's prompt tokens found in the prefix cache, and TTFT means something else.
PREFIX_HIT_LIMIT = 0.01
SHAPE_TOKENS = 8  # a few steps of each batch size are what its graph or kernel needs
MOST_SHAPES = 64
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of one engine. `limits` are milliseconds by vLLM's names: ttft, tpot, e2el.

    Each of `loads` is a closed loop; each of `rates` an open one, in requests per second. A `repeat` draws
    prompts of its own.
    """

    loads: Sequence[int]
    requests: int
    output_tokens: int
    temperature: float
    rates: Sequence[float] = ()
    accuracy_problems: int = 0
    repeat: int = 0
    ignore_eos: bool = False
    chat: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)
    strict: bool = True

    @classmethod
    def of_sweep(cls, settings: SweepSettings) -> Plan:
        """A sweep's settings as a plan."""
        return cls(
            settings.loads,
            settings.prompts_per_load,
            settings.output_tokens,
            settings.temperature,
            accuracy_problems=settings.accuracy_problems,
        )

    @property
    def widest(self) -> int:
        """Requests in flight at the heaviest closed loop."""
        return max(self.loads, default=1)

    @property
    def levels(self) -> list[tuple[int, float | None]]:
        """Concurrency and rate of every load level, in the order of measurement."""
        closed: list[tuple[int, float | None]] = [(load, None) for load in self.loads]
        return closed + [(self.widest, rate) for rate in self.rates]


@dataclass(frozen=True, slots=True)
class LoadMeasurement:
    """One load level: what the client saw, what the engine counted meanwhile, and both in numbers."""

    result: LoadResult
    acceptance: Acceptance
    prefix_hit_rate: float
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InvalidLoad:
    """A load level that is no measurement: it has reasons, and no numbers."""

    concurrency: int
    rate: float | None
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything measured on one engine. `seconds` by phase; the accuracy items have a file of their own."""

    loads: list[LoadMeasurement]
    accuracy_acceptance: Acceptance
    accuracy: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)
    invalid: list[InvalidLoad] = field(default_factory=list)

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
                LoadResult(**load["result"]),
                _acceptance(load["acceptance"]),
                load["prefix_hit_rate"],
                load.get("summary", {}),
            )
            for load in document["loads"]
        ]
        return cls(
            loads,
            _acceptance(document["accuracy_acceptance"]),
            document["accuracy"],
            document["seconds"],
            [InvalidLoad(**each) for each in document.get("invalid", [])],
        )


def _acceptance(document: dict[str, Any]) -> Acceptance:
    return Acceptance(**{**document, "per_position": tuple(document["per_position"])})


def measure(
    loaded: LoadedProfile,
    facts: Facts,
    plan: Plan,
    workload: Workload,
    folder: Path,
    say: Say,
    extra: Sequence[str] = (),
) -> tuple[Measurement, AccuracyRun, ReadyReport]:
    """Measure one configuration; `extra` are flags of vLLM's. Raises EngineError or MeasurementError."""
    if plan.accuracy_problems:
        faults = synthetic_faults(config_of_flags(extra), "accuracy")
        if faults:
            raise InputError([f"{fault.code}: {fault.message}; {fault.remedy}" for fault in faults])
    loaded = instrumented(loaded, facts)
    profile = loaded.profile
    seconds: dict[str, float] = {}
    started = time.monotonic()
    say("booting the engine")
    with Engine.start(loaded, facts, RunDirectory(folder), list(extra)) as engine:
        ready = engine.wait_ready()
        seconds["boot"] = time.monotonic() - started
        with Endpoint(engine.url, served_name(profile)) as endpoint:
            session = _Session(engine, endpoint, loaded, facts, plan, workload, folder)
            timed = _Stopwatch(seconds)
            with timed("warm-up"):
                say("warming up")
                with blaming_the_dead(engine):
                    session.warm_up()
            loads: list[LoadMeasurement] = []
            invalid: list[InvalidLoad] = []
            levels = plan.levels
            for index, (concurrency, rate) in enumerate(levels):
                name = f"load {concurrency}" if rate is None else f"{rate:g} requests/s"
                say(name)
                with timed(name):
                    try:
                        loads.append(session.measure_load(index, concurrency, rate))
                    except (LoadFailedError, MetricsError) as error:
                        if plan.strict:
                            raise
                        invalid.append(InvalidLoad(concurrency, rate, [str(error)]))
                        say(f"{name} is invalid: {error}")
            with timed("accuracy"), blaming_the_dead(engine):
                answers, accuracy_acceptance = session.measure_accuracy(say)
        stopping = time.monotonic()
    seconds["stop"] = time.monotonic() - stopping
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    measured = Measurement(loads, accuracy_acceptance, answers.counts(), rounded, invalid)
    return measured, answers, ready


@contextmanager
def blaming_the_dead(engine: Engine) -> Iterator[None]:
    """An engine that has died is the better explanation of what failed meanwhile. Raises EngineDiedError."""
    try:
        yield
    except MeasurementError:
        time.sleep(DYING_S)  # the client notices first
        engine.check_alive()
        raise


def instrumented(loaded: LoadedProfile, facts: Facts) -> LoadedProfile:
    """The profile with what measuring needs of the engine, and serving doesn't.

    The prefix cache can be emptied, by vLLM's development routes, which only this machine may reach; and each
    answer carries its own acceptance, where this vLLM can say it.
    """
    profile = loaded.profile
    changes: dict[str, Any] = {}
    if profile.engine.host in LOOPBACK:
        changes["engine.env"] = {**profile.engine.env, "VLLM_SERVER_DEV_MODE": "1"}
    if profile.speculative is not None and facts.has("per_request_acceptance"):
        changes["engine.args"] = {"per-request-spec-decode-metrics": "summary", **profile.engine.args}
    return loaded.revised(changes) if changes else loaded


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


def batch_shapes(profile: Profile, widest: int) -> list[int]:
    """Batch sizes that warm-up must have run: those captured, up to the widest load; else powers of two."""
    speculative = profile.speculative
    width = 1 + (speculative.num_speculative_tokens if speculative else 0)
    captured = [size // width for size in capture_sizes(profile) if size // width <= widest]
    shapes = captured or [1 << power for power in range(widest.bit_length())]
    if len(shapes) > MOST_SHAPES:  # ends and evenly between: a graph serves the sizes below it, too
        shapes = sorted(
            {shapes[round(i * (len(shapes) - 1) / (MOST_SHAPES - 1))] for i in range(MOST_SHAPES)}
        )
    return sorted({*shapes, widest})


class _Session:
    """One ready engine with what is asked of it."""

    def __init__(
        self,
        engine: Engine,
        endpoint: Endpoint,
        loaded: LoadedProfile,
        facts: Facts,
        plan: Plan,
        workload: Workload,
        folder: Path,
    ) -> None:
        self._engine, self._endpoint = engine, endpoint
        self._profile = loaded.profile
        self._facts, self._plan, self._workload, self._folder = facts, plan, workload, folder

    def warm_up(self) -> None:
        """Bursts of every batch size, then full answers at the widest load; prompts of their own."""
        widest = self._plan.widest
        shapes = batch_shapes(self._profile, widest)
        prompts = self._workload.warm_up_prompts(sum(shapes) + 2 * widest)
        short = Sampling(min(SHAPE_TOKENS, self._plan.output_tokens), ignore_eos=True)
        whole = Sampling(self._plan.output_tokens)
        with ThreadPoolExecutor(widest) as pool:
            for shape in shapes:
                burst, prompts = prompts[:shape], prompts[shape:]
                list(pool.map(lambda prompt: self._endpoint.complete(prompt, short), burst))
            list(pool.map(lambda prompt: self._endpoint.complete(prompt, whole), prompts))

    def measure_load(self, index: int, concurrency: int, rate: float | None) -> LoadMeasurement:
        """One load level. Raises LoadFailedError or MetricsError where it is no clean measurement."""
        plan, profile = self._plan, self._profile
        reset = self._endpoint.reset_prefix_cache()
        conditions = [snapshot()]
        before = self._scrape()
        load = Load(
            concurrency,
            self._workload.requests(index, max(plan.requests, concurrency), plan.repeat),
            plan.output_tokens,
            plan.temperature,
            rate,
            plan.ignore_eos,
            plan.chat,
            plan.limits,
        )
        with blaming_the_dead(self._engine):
            result = run_load(
                load,
                url=self._engine.url,
                model=served_name(profile),
                tokenizer=resolve(profile.model.path),
                distribution=self._facts.vllm_distribution,
                folder=self._folder / (f"load-{concurrency}" if rate is None else f"rate-{rate:g}"),
                timeout_s=LOAD_TIMEOUT_S,
            )
        after = self._scrape()
        conditions.append(snapshot())
        counted = difference(before, after)
        queries = total(counted, PREFIX_QUERIES)
        hit_rate = total(counted, PREFIX_HITS) / queries if queries else 0.0
        if hit_rate > PREFIX_HIT_LIMIT:
            raise LoadFailedError(
                f"{hit_rate:.1%} of the prompt tokens at load {concurrency} came from the prefix cache: "
                f"its times are not those of fresh prompts. Set engine.args.enable-prefix-caching to false"
            )
        acceptance = acceptance_between(before, after)
        fixed_k = profile.speculative is not None and profile.speculative.verification.kind == "fixed"
        summary = load_summary(result, profile.hardware.gpus) | {
            "acceptance": acceptance_summary(
                acceptance, result, past_end_share(counted), delivered_length(counted), fixed_k
            ),
            "prefix_cache_reset": reset,
            "conditions": conditions,
            "notes": notes(result, conditions),
        }
        slim = replace(result, chunk_gaps_ms=[])  # a gap per step and request is for bench.json alone
        return LoadMeasurement(slim, acceptance, hit_rate, summary)

    def measure_accuracy(self, say: Say) -> tuple[AccuracyRun, Acceptance]:
        """The workload's questions, greedily; nothing where none are asked for or it has none."""
        questions = self._workload.questions(self._plan.accuracy_problems)
        if not questions:
            return AccuracyRun([]), NO_DRAFTS
        say(f"accuracy, {len(questions)} problems")
        before = self._scrape()
        ask = self._workload.asker(self._endpoint)
        answers = run_accuracy(
            questions,
            ask or greedy(self._endpoint, self._plan.output_tokens, self._workload.answer),
            concurrency=self._plan.widest,
        )
        if reasons := self._workload.void_reasons(answers):
            raise AccuracyVoidError("the answers have no accuracy: " + "; ".join(reasons))
        return answers, acceptance_between(before, self._scrape())

    def _scrape(self) -> Scrape:
        self._engine.check_alive()
        with blaming_the_dead(self._engine):
            return self._endpoint.scrape()


def notes(result: LoadResult, conditions: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader of this load level must know, though its numbers stand."""
    found = [sentence for moment in conditions for sentence in throttled(moment)]
    if result.rate is None and result.requests < 10 * result.concurrency:
        found.append(
            f"{result.requests} requests at {result.concurrency} in flight: "
            f"output tokens/s include ramp and drain"
        )
    late = [value for value in result.lateness_ms if value > result.mean_tpot_ms]
    if len(late) > 0.05 * max(len(result.lateness_ms), 1):
        found.append(
            f"the client was late by over one TPOT for {len(late)} of {len(result.lateness_ms)} requests"
        )
    busy = max(moment["load_1_min"] / (moment["cores"] or 1) for moment in conditions)
    if busy > 1.5:
        found.append(f"the machine was loaded: {busy:.1f} runnable threads a core")
    return list(dict.fromkeys(found))
