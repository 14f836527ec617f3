"""What a wrong output of an mHC operator is likely caused by, and the sentence that says so.

Without torch, since `dspark-serve` words what its workers found. Not covered: whether an output is wrong,
which `dspark_deploy.kernels.gate` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def wrong_operators(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each class and variant with a wrong row: its worst, and how many more there are."""
    wrong: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["cause"]:
            wrong.setdefault((row["operator"], row["variant"]), []).append(row)
    found = []
    for alike in wrong.values():
        worst = max(alike, key=lambda row: (row["nans"] > 0, row["tokens"], row["nrmse"] or 0.0))
        more = len({row["place"] for row in alike}) - 1
        found.append(described(worst) + (f" So are {more} more of its class." if more else ""))
    return found


def described(row: Mapping[str, Any]) -> str:
    """A wrong row as a sentence, with the likely cause. Its numbers may be None, as JSON has them."""
    numbers = [
        f"{what} {row[name]:.5g}"
        for what, name in (("ratio", "ratio"), ("NRMSE", "nrmse"), ("worst element off by", "worst"))
        if row[name] is not None and row[name] == row[name]
    ]
    if row["nans"]:
        numbers.append(f"{row['nans']} NaN")
    variant = f" ({row['variant']})" if row["variant"] else ""
    where = f"{row['output']} at {row['tokens']} tokens" if row["output"] else f"{row['tokens']} tokens"
    place = f" at {row['place']}" if row["place"] != row["operator"] else ""
    return (
        f"{row['operator']}{variant}{place}, by {row['route']}, is wrong: "
        f"{', '.join([where, *numbers])}. {row['cause']}"
    )


def cause(output: str, ratio: float, nans: int, few: bool = False) -> str:
    """The likely cause of a wrong output, and what it does to the model's answers.

    `few`: the output as a whole is within its limits, and some elements aren't.
    """
    if few:
        return (
            "Few elements are wrong, as where a last block or token is left out. Some answers will be wrong."
        )
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
