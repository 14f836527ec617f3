"""The schema of a profile. Every key here has an effect in a command; unknown keys are errors.

Types are strict: `"5"` is not 5, so that a quoted number is caught here and not in a ten-minute load.
`docs/profiles.md` explains each key for the person who writes one.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

Scalar = str | int | float | bool
Positive = Annotated[int, Field(ge=1)]
# YAML 1.1 reads an unquoted `off` as false.
UNQUOTED_OFF = BeforeValidator(lambda value: "off" if value is False else value)
# What a vLLM flag can hold: a scalar, a list for flags that repeat, a mapping for flags that take JSON.
ArgValue = Scalar | None | list[Scalar] | dict[str, object]

# `${NAME}` inside a value of engine.env, and nowhere else: how a secret reaches the engine by reference.
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

# Flags that a profile states elsewhere. Two places for one setting would let them disagree.
OWNED_ARGS = {
    "host": "engine.host",
    "port": "engine.port",
    "model": "model.path",
    "served-model-name": "model.served_name",
    "speculative-config": "speculative",
    "spec-method": "speculative.method",
    "spec-model": "speculative.draft",
    "spec-tokens": "speculative.num_speculative_tokens",
    "uds": "engine.host and engine.port",
}

# Far above any batch that is served; a capture size is rendered for each, so a slip would fill the memory.
MOST_SEQUENCES = 65_536
# What a person can have meant: a number above is a slip, which would run for weeks or fill the memory.
MOST_REQUESTS, MOST_TOKENS, MOST_BOOTS, MOST_TEMPERATURE = 100_000, 10_000_000, 100, 10.0


class Section(BaseModel):
    """Base of every section: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Model(Section):
    """The target checkpoint: `builtin:NAME`, a folder, or a name on the hub.

    `family` is config.json's `model_type`, for rules that depend on it where config.json is not at hand.
    """

    path: str = Field(min_length=1)
    served_name: str | None = None
    family: str | None = None


class Hardware(Section):
    """What the profile is for. `arch` is the compiler's name of the architecture: gfx950, sm90, x86_64."""

    platform: Literal["cpu", "rocm", "cuda"]
    arch: str | None = None
    gpus: int = Field(0, ge=0)


class Engine(Section):
    """How vLLM is started. `args` are vLLM's flags without dashes; `env` is added to its environment.

    `image` is the container image that the profile is meant for; known bad ones are refused.
    """

    vllm: str = ">=0.26"
    image: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    ready_timeout_s: int = Field(600, ge=1)
    stop_timeout_s: int = Field(30, ge=1)
    args: dict[str, ArgValue] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    cpu_twins: bool = True

    def references(self) -> set[str]:
        """Names of the variables that values of `env` take from our own environment, as `${NAME}`."""
        return {name for value in self.env.values() for name in REFERENCE.findall(value)}

    @field_validator("env")
    @classmethod
    def _are_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of an environment variable")
        return value

    @field_validator("vllm")
    @classmethod
    def _is_specifier(cls, value: str) -> str:
        try:
            SpecifierSet(value).contains("0")  # its versions are read when it is asked
        except ValueError as error:
            raise ValueError(f"{value!r} is not a version range; write one like '>=0.26,<0.34'") from error
        return value

    @field_validator("args")
    @classmethod
    def _owned_elsewhere(cls, value: dict[str, ArgValue]) -> dict[str, ArgValue]:
        for name in value:
            flag, dot, key = name.lstrip("-").partition(".")
            bare = flag.replace("_", "-")
            if name != f"{bare}{dot}{key}":  # keys of a JSON flag keep their underscores
                raise ValueError(
                    f"write {name!r} as {f'{bare}{dot}{key}'!r}: no leading dashes, dashes between words"
                )
            if bare.startswith("no-") and bare.removeprefix("no-") in OWNED_ARGS:
                bare = bare.removeprefix("no-")
            number = value[name]
            if bare == "max-num-seqs" and isinstance(number, int) and number > MOST_SEQUENCES:
                raise ValueError(f"{bare}: {number} is no number of requests; the most is {MOST_SEQUENCES}")
            if bare in OWNED_ARGS:
                raise ValueError(f"{name!r} is set by {OWNED_ARGS[bare]}, not here")
        return value


class Fixed(Section):
    """Every step verifies the same number of draft tokens."""

    kind: Literal["fixed"]


class Schedule(Section):
    """The number of draft tokens by batch size: `[[first, last, k], ...]` (vLLM's own table)."""

    kind: Literal["schedule"]
    per_batch_size: list[tuple[int, int, int]] = Field(min_length=1)

    @field_validator("per_batch_size", mode="before")
    @classmethod
    def _rows(cls, value: object) -> object:
        if isinstance(value, list):  # YAML has no tuples, and strict mode takes no list for one
            return [tuple(row) if isinstance(row, list) else row for row in value]
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Schedule:
        previous = 0
        for first, last, tokens in self.per_batch_size:
            if not (previous < first <= last and tokens >= 0):
                raise ValueError(
                    f"row [{first}, {last}, {tokens}] is out of order: rows must not overlap, "
                    f"must rise, and k must not be negative"
                )
            previous = last
        if self.per_batch_size[0][0] != 1:  # vLLM refuses it when the engine starts
            raise ValueError("the first row must start at batch size 1, so that every batch has a number")
        return self


class Adaptive(Section):
    """vLLM chooses how many drafts to verify from confidence and measured cost. Needs full CUDA graphs."""

    kind: Literal["adaptive"]


class Speculative(Section):
    """The draft. `draft` is omitted where the target's checkpoint carries its own (`mtp.*`)."""

    method: Literal["dspark", "mtp"] = "dspark"
    draft: str | None = None
    num_speculative_tokens: int = Field(ge=1, le=16)
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block"] = "standard"
    dspark_draft_topk: int | None = Field(None, ge=1)
    verification: Annotated[Fixed | Schedule | Adaptive, Field(discriminator="kind")] = Fixed(kind="fixed")

    @model_validator(mode="after")
    def _schedule_within_k(self) -> Speculative:
        if isinstance(self.verification, Schedule):
            highest = max(tokens for _, _, tokens in self.verification.per_batch_size)
            if highest > self.num_speculative_tokens:
                raise ValueError(
                    f"the schedule asks for {highest} tokens, above num_speculative_tokens: "
                    f"{self.num_speculative_tokens}"
                )
        return self


class Mhc(Section):
    """DeepSeek-V4's hyper-connections: who computes them, and what happens where the numbers are wrong."""

    provider: Literal["auto", "aiter", "tilelang", "torch"] = "auto"
    gate: Annotated[Literal["refuse", "warn", "off"], UNQUOTED_OFF] = "refuse"


class Jit(Section):
    """Compilation while the engine runs. `guard` is for compiles in graph capture and after readiness."""

    guard: Annotated[Literal["error", "warn", "off"], UNQUOTED_OFF] = "warn"


class Expectation(Section):
    """A range that a measurement should fall into; what falls outside is reported, with the source.

    It holds for one `workload` (a name of `dspark-tune`'s, or `gsm8k` with `/PROTOCOL` where it matters) and,
    where they are given, for one k (0: no speculation), temperature and thinking. Milliseconds of `tpot_ms`
    are means at `concurrency` requests in flight.
    """

    workload: str
    num_speculative_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0)
    thinking: bool | None = None
    concurrency: Positive | None = None
    acceptance_length: tuple[float, float] | None = None
    accuracy: tuple[float, float] | None = None
    tpot_ms: tuple[float, float] | None = None
    source: str = ""

    @field_validator("acceptance_length", "accuracy", "tpot_ms", mode="before")
    @classmethod
    def _range(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("acceptance_length", "accuracy", "tpot_ms")
    @classmethod
    def _rises(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] <= value[1]:
            raise ValueError("a range goes from the lower number to the higher")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Expectation:
        if not (self.acceptance_length or self.accuracy or self.tpot_ms):
            raise ValueError("give acceptance_length, accuracy or tpot_ms, as [lowest, highest]")
        if self.tpot_ms and self.concurrency is None:
            raise ValueError("tpot_ms is for one load: give concurrency")
        return self


class SpaceSettings(Section):
    """The configurations that a sweep measures: every combination, `none` being no speculation.

    A setting that is left out stays as the profile has it. `verification` takes `fixed`, `adaptive`,
    `schedule` (by batch size, made from what the fixed ones measured), or a schedule of one's own.
    `capture_sizes` takes `rendered` (every multiple of k+1), a largest size, or a list of sizes.
    """

    num_speculative_tokens: list[int | Literal["none"]] = Field(["none", 1, 2, 3, 5, 7], min_length=1)
    draft_sample_method: list[Literal["greedy", "probabilistic"]] = Field(["greedy"], min_length=1)
    verification: list[Literal["fixed", "adaptive", "schedule"] | Schedule] = Field(default_factory=list)
    rejection_sample_method: list[Literal["standard", "block"]] = Field(default_factory=list)
    dspark_draft_topk: list[Positive | Literal["all"]] = Field(default_factory=list)
    capture_sizes: list[Literal["rendered"] | Positive | list[Positive]] = Field(default_factory=list)
    max_num_seqs: list[Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]] = Field(default_factory=list)
    max_num_batched_tokens: list[Positive] = Field(default_factory=list)
    mhc_provider: list[Literal["auto", "aiter", "tilelang", "torch"]] = Field(default_factory=list)

    @field_validator("num_speculative_tokens")
    @classmethod
    def _in_range(cls, value: list[int | str]) -> list[int | str]:
        for k in value:
            if isinstance(k, int) and not 1 <= k <= 16:
                raise ValueError(f"{k} is not a number of speculative tokens: 1 to 16, or none")
        return value


class Slo(Section):
    """What users were promised, in milliseconds, held against a percentile over requests."""

    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)
    percentile: int = Field(99, ge=1, le=99)

    @model_validator(mode="after")
    def _limits_something(self) -> Slo:
        if self.ttft_ms is None and self.tpot_ms is None:
            raise ValueError("give ttft_ms, tpot_ms or both: without a limit nothing is promised")
        return self


class SweepSettings(Section):
    """The defaults of `dspark-tune sweep` for this profile; each has a flag of the same meaning.

    `sampler: auto` is the whole grid up to 64 points, and TPE beyond. `search: predicted` orders and prunes
    by predicted TPOT. The best `finalists` of each goal and no speculation are booted `boots` times more.
    With `torch_reference`, answers are compared with those of torch's mHC where the provider can be chosen.
    """

    space: SpaceSettings = SpaceSettings()
    sampler: Literal["auto", "grid", "tpe", "gp", "nsga2", "random"] = "auto"
    trials: int | None = Field(None, ge=1, le=MOST_REQUESTS)
    search: Literal["all", "predicted"] = "all"
    workload: str = "tiny-arithmetic"
    data: str | None = None
    loads: list[Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]] = Field([1, 8], min_length=1)
    prompts_per_load: int = Field(32, ge=1, le=MOST_REQUESTS)
    output_tokens: int = Field(96, ge=2, le=MOST_TOKENS)
    temperature: float = Field(0.0, ge=0, le=MOST_TEMPERATURE)
    accuracy_problems: int = Field(100, ge=1, le=MOST_REQUESTS)
    accuracy_margin: float = Field(0.05, gt=0, lt=1)
    torch_reference: bool = True
    finalists: int = Field(2, ge=1, le=MOST_BOOTS)
    boots: int = Field(3, ge=0, le=MOST_BOOTS)
    slo: Slo | None = None
    goal: Literal["latency", "throughput", "slo"] = "latency"

    @field_validator("loads")
    @classmethod
    def _different(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError("names a number twice; each load is measured once")
        return value

    @model_validator(mode="after")
    def _goal_has_limits(self) -> SweepSettings:
        if self.goal == "slo" and self.slo is None:
            raise ValueError("goal: slo needs limits in slo: ttft_ms, tpot_ms or both")
        if self.boots in (1, 2):
            raise ValueError("boots: fewer than 3 say nothing of their spread; use 3 or more, or 0 for none")
        return self


class Profile(Section):
    """One deployment."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    model: Model
    hardware: Hardware
    engine: Engine = Engine()
    speculative: Speculative | None = None
    mhc: Mhc = Mhc()
    jit: Jit = Jit()
    expect: list[Expectation] = Field(default_factory=list)
    sweep: SweepSettings = SweepSettings()
