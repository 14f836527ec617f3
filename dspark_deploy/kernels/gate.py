"""The numerics gate: vLLM's mHC operators, as they are dispatched here, against fp64 on the device.

    report = check_operators({"mhc_pre": (operator, geometry)}, device)

Token counts lie on both sides of every limit at which vLLM or a kernel takes another path. An output is wrong
where it holds a NaN, where the ratio of norms is off by over `RATIO_LIMIT`, or where NRMSE exceeds
`NRMSE_LIMIT`. Both are far above what rounding to bf16 does (NRMSE 1.7e-3 once, 2.4e-3 twice) and what a
projection in TF32 does, and far below the faults that are known: a norm over half a wave is 41 % off.

Not covered: operators that a model calls as plain functions, and faults that show only at other shapes or
under load.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dspark_deploy.kernels.references import BUILDERS, Geometry, OperatorCase, operator_cases

TOKENS = (1, 8, 16, 17, 32, 33, 64, 128, 129, 512, 513, 1024)
RATIO_LIMIT, NRMSE_LIMIT = 0.01, 0.02
TIMED_CALLS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One output of one operator at one token count. `microseconds` is the median time of the whole call."""

    operator: str
    variant: str
    route: str
    hidden: int
    tokens: int
    output: str
    ratio: float
    nrmse: float
    nans: int
    microseconds: float
    cause: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the output is outside the limits."""
        return bool(self.cause)


@dataclass(slots=True)
class GateReport:
    """What the gate saw in one process. `state` is `passed`, `wrong`, `not applicable` or `off`.

    `unchecked` names operators that there is no reference for, which is a note and not a verdict.
    """

    state: str
    reason: str = ""
    device: str = ""
    seconds: float = 0.0
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
            for name in ("ratio", "nrmse"):
                row[name] = round(row[name], 6) if abs(row[name]) < float("inf") else None
        return document

    def message(self) -> str:
        """Every wrong operator once, at its most tokens, where a ratio is least noisy."""
        worst: dict[tuple[str, str], Row] = {}
        for row in self.wrong:
            key = (row.operator, row.variant)
            if key not in worst or (row.nans > 0, row.tokens) > (worst[key].nans > 0, worst[key].tokens):
                worst[key] = row
        return "\n".join(
            f"{row.operator}{f' ({row.variant})' if row.variant else ''} by {row.route} is wrong: "
            f"{row.output} at {row.tokens} tokens, ratio {row.ratio:.4f}, NRMSE {row.nrmse:.2g}, "
            f"{row.nans} NaN. {row.cause}"
            for row in worst.values()
        )


def cause(output: str, ratio: float, nans: int) -> str:
    """The likely cause of a wrong output, and what it does to the model's answers."""
    if nans:
        return "Likely a read of a lane or of shared memory that was never written. Answers will be garbage."
    if abs(ratio - 2**0.5) < 0.02:
        return (
            "A norm over half of the elements: a reduction whose thread group doesn't start at a wavefront. "
            "Each layer's input is 1.41 times too large; accuracy falls while acceptance length hardly moves."
        )
    if abs(ratio - 0.5) < 0.03 or abs(ratio - 0.5**0.5) < 0.02:
        return (
            "About half of a sum is missing: a partial reduction, or a wavefront that ran ahead of another's "
            "write to shared memory. Accuracy will fall."
        )
    return f"Unknown: {output} doesn't match its formula. Accuracy will likely fall."


def check_operators(
    operators: Mapping[str, tuple[Any, Geometry]], device: torch.device, tokens: Sequence[int] = TOKENS
) -> GateReport:
    """Run each operator, a callable named by its class, over `tokens`; inputs live on `device`.

    `operators` maps a label to the operator and the geometry of the model it is in. What an operator raises
    passes through: an operator that can't run is no engine to start.
    """
    started = time.monotonic()
    report = GateReport("passed", device=_device_name(device))
    for operator, geometry in operators.values():
        name = type(operator).__name__
        if name not in BUILDERS:
            report.unchecked.append(name)
            continue
        before = len(report.rows)
        for count in tokens:
            for case in operator_cases(name, geometry, count, device):
                report.rows += _rows(operator, geometry, count, case, device)
        if len(report.rows) == before:  # takes none of the arguments that are known
            report.unchecked.append(name)
    report.seconds = round(time.monotonic() - started, 2)
    if report.wrong:
        report.state = "wrong"
    elif not report.rows:
        report.state, report.reason = "not applicable", "model has no mHC ops"
    return report


def _rows(
    operator: Any, geometry: Geometry, tokens: int, case: OperatorCase, device: torch.device
) -> Iterable[Row]:
    arguments = _accepted(operator, case.arguments)
    if arguments is None:
        return
    with torch.inference_mode():
        results = operator(**arguments)
        microseconds = _timed(operator, arguments, device)
    outputs = [results] if isinstance(results, torch.Tensor) else list(results)
    # Operators that hand the residual back do so first, and only some versions do.
    names = case.references[-len(outputs) :]
    assert len(names) == len(outputs), (
        f"{type(operator).__name__} gave {len(outputs)} results, not {len(names)}"
    )
    for (output, reference), result in zip(names, outputs, strict=True):
        got = result.double().reshape(reference.shape)
        nans = int(got.isnan().sum())
        ratio = float(got.norm() / reference.norm())
        nrmse = float((got - reference).norm() / reference.norm())
        wrong = nans or not abs(ratio - 1) < RATIO_LIMIT or not nrmse < NRMSE_LIMIT
        yield Row(
            operator=type(operator).__name__,
            variant=case.variant,
            route=_route(operator),
            hidden=geometry.hidden,
            tokens=tokens,
            output=output,
            ratio=ratio,
            nrmse=nrmse,
            nans=nans,
            microseconds=microseconds,
            cause=cause(output, ratio, nans) if wrong else "",
        )


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
