"""The numerics gate: vLLM's mHC operators, as they are dispatched here, against fp64 on the device.

    report = check_operators({"layers.0.mhc_pre": (operator, geometry)}, device)

Token counts lie on both sides of every limit at which vLLM or a kernel takes another path. Of operators
that are alike, by class, route, own numbers and geometry, the first is checked at every token count and the
others at `ALIKE_TOKENS`, so that one that was replaced or damaged by itself is found.

An output is wrong where it holds a NaN, where the ratio of norms is off by over `RATIO_LIMIT`, where NRMSE
exceeds `NRMSE_LIMIT`, or where a single element is off by more than `ELEMENT_LIMIT` of the output's root mean
square and `ELEMENT_SHARE` of itself: a tail that one token is in drowns in the other two. All are far above
what rounding to bf16 does (NRMSE 1.7e-3 once, 2.4e-3 twice) and what a projection in TF32 does, and far below
the faults that are known: a norm over half a wave is 41 % off. An operator that raises is wrong, too.

Not covered: operators that a model calls as plain functions, what an operator does to its inputs, and faults
that show only at other shapes or under load.
"""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dspark_deploy.kernels.causes import cause, wrong_operators
from dspark_deploy.kernels.references import BUILDERS, Geometry, OperatorCase, operator_cases

TOKENS = (1, 8, 16, 17, 32, 33, 64, 128, 129, 512, 513, 1024)
ALIKE_TOKENS = (8, 513)
RATIO_LIMIT, NRMSE_LIMIT = 0.01, 0.02
ELEMENT_LIMIT, ELEMENT_SHARE = 0.05, 0.02
TIMED_CALLS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One output of one operator at one token count.

    `worst` is the largest error of an element, as `ELEMENT_LIMIT` has it. `microseconds` is the median time
    of the whole call, None where it was not taken. An operator that raised has no outputs; its ratio is NaN.
    """

    place: str
    operator: str
    variant: str
    route: str
    hidden: int
    tokens: int
    output: str
    ratio: float
    nrmse: float
    worst: float
    nans: int
    microseconds: float | None
    cause: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the output is outside the limits."""
        return bool(self.cause)


@dataclass(slots=True)
class GateReport:
    """What the gate saw in one process. `state` is `passed`, `wrong`, `not applicable` or `off`.

    `operators` is how many were checked; of those alike, `rows` has the first's, and the others' wrong ones.
    `unchecked` names operators that there is no reference for, which is a note and not a verdict.
    """

    state: str
    reason: str = ""
    device: str = ""
    seconds: float = 0.0
    operators: int = 0
    rows: list[Row] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """The rows outside the limits."""
        return [row for row in self.rows if row.wrong]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values. NaN and infinity, which JSON has not, become None."""
        document = asdict(self)
        for row in document["rows"]:
            for name in ("ratio", "nrmse", "worst"):
                row[name] = round(row[name], 6) if abs(row[name]) < float("inf") else None
        return document

    def message(self) -> str:
        """Every wrong class of operators once, at its most tokens, where a ratio is least noisy."""
        return "\n".join(wrong_operators([asdict(row) for row in self.rows]))


def check_operators(
    operators: Mapping[str, tuple[Any, Geometry]], device: torch.device, tokens: Sequence[int] = TOKENS
) -> GateReport:
    """Run each operator, a callable named by its class, over `tokens`; inputs live on `device`.

    `operators` maps the operator's place to it and the geometry of the model it is in.
    """
    started = time.monotonic()
    report = GateReport("passed", device=_device_name(device))
    alike: dict[tuple[Any, ...], list[str]] = {}
    for place, (operator, geometry) in operators.items():
        alike.setdefault((*_kind(operator), geometry), []).append(place)
    for places in alike.values():
        first, geometry = operators[places[0]]
        name = type(first).__name__
        if name not in BUILDERS:
            report.unchecked.append(name)
            continue
        before = len(report.rows)
        for count in tokens:
            others = places[1:] if count in ALIKE_TOKENS else []
            for case in operator_cases(name, geometry, count, device):
                report.rows += _rows(places[0], first, geometry, count, case, device, timed=True)
                for place in others:
                    found = _rows(place, operators[place][0], geometry, count, case, device, timed=False)
                    report.rows += (row for row in found if row.wrong)
        if len(report.rows) == before:  # takes none of the arguments that are known
            report.unchecked.append(name)
        else:
            report.operators += len(places)
    report.seconds = round(time.monotonic() - started, 2)
    if report.wrong:
        report.state = "wrong"
    elif not report.rows:
        report.state, report.reason = "not applicable", "model has no mHC ops"
    return report


def _kind(operator: Any) -> tuple[Any, ...]:
    """What two operators have in common that compute alike: class, route, and the numbers that they hold."""
    numbers = {
        name: value
        for name, value in vars(operator).items()
        if isinstance(value, bool | int | float | str | torch.dtype | None)
    }
    return type(operator), _route(operator), tuple(sorted(numbers.items(), key=lambda item: item[0]))


def _rows(
    place: str,
    operator: Any,
    geometry: Geometry,
    tokens: int,
    case: OperatorCase,
    device: torch.device,
    timed: bool,
) -> list[Row]:
    arguments = _accepted(operator, case.arguments)
    if arguments is None:
        return []
    row = functools.partial(
        Row, place, type(operator).__name__, case.variant, _route(operator), geometry.hidden, tokens
    )
    try:
        with torch.inference_mode():
            results = operator(**arguments)
            outputs = [results] if isinstance(results, torch.Tensor) else list(results)
            # Operators that hand the residual back do so first, and only some versions do.
            expected = case.references[-len(outputs) :]
            if len(expected) != len(outputs):
                raise ValueError(f"it gave {len(outputs)} results, and has {len(expected)}")
            # Before it is called again: an operator may write into what it was given.
            compared = [
                (name, *_compared(result.double().reshape(reference.shape), reference))
                for (name, reference), result in zip(expected, outputs, strict=True)
            ]
            microseconds = _timed(operator, arguments, device) if timed else None
    # What torch, a launcher and a check of arguments raise: a gate that dies by it names no operator.
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError) as error:
        nan = float("nan")
        return [row("", nan, nan, nan, 0, None, f"It raised {type(error).__name__}: {error}")]
    return [
        row(name, ratio, nrmse, worst, nans, microseconds, _verdict(name, ratio, nrmse, worst, nans))
        for name, ratio, nrmse, worst, nans in compared
    ]


def _compared(got: torch.Tensor, reference: torch.Tensor) -> tuple[float, float, float, int]:
    """Ratio of norms, NRMSE, largest error of an element, and how many are NaN; both tensors in fp64."""
    error, norm = got - reference, reference.norm()
    root_mean_square = norm / reference.numel() ** 0.5
    beyond = (error.abs() - ELEMENT_SHARE * reference.abs()).max()
    numbers = (got.norm() / norm, error.norm() / norm, beyond.clamp(min=0) / root_mean_square)
    ratio, nrmse, worst = (float(each) for each in numbers)
    return ratio, nrmse, worst, int(got.isnan().sum())


def _verdict(output: str, ratio: float, nrmse: float, worst: float, nans: int) -> str:
    """The cause where an output is outside the limits, else nothing. A NaN is within no limit."""
    whole = not nans and abs(ratio - 1) < RATIO_LIMIT and nrmse < NRMSE_LIMIT
    if whole and worst < ELEMENT_LIMIT:
        return ""
    return cause(output, ratio, nans, few=whole)


def _accepted(operator: Any, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments, or None where this version of the operator doesn't take one of them."""
    parameters = inspect.signature(_forward(operator)).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return arguments if takes_all or set(arguments) <= set(parameters) else None


def _forward(operator: Any) -> Any:
    """What vLLM dispatches a call to on this platform; the callable itself for anything else."""
    return getattr(operator, "_forward_method", operator)


def _route(operator: Any) -> str:
    return str(getattr(_forward(operator), "__name__", type(operator).__name__))


def _timed(operator: Any, arguments: dict[str, Any], device: torch.device) -> float:
    times = []
    for _ in range(TIMED_CALLS):
        _synchronize(device)
        started = time.perf_counter()
        operator(**arguments)
        _synchronize(device)
        times.append((time.perf_counter() - started) * 1e6)
    return round(statistics.median(times), 1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":  # ROCm's torch calls its devices so, too
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
