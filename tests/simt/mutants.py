"""Edits of our kernels' text, each a mistake that a test must notice."""

from __future__ import annotations

import re

ROW_SUM = "(cm[j * HC] + cm[j * HC + 1]) + (cm[j * HC + 2] + cm[j * HC + 3])"
COLUMN_SUM = "(cm[k] + cm[HC + k]) + (cm[2 * HC + k] + cm[3 * HC + k])"
NORM = "total[0] / hidden_size + norm_eps"

# Name -> kernel, the text, what is put in its place; in a loop, its last occurrence.
MUTANTS: dict[str, tuple[str, str, str]] = {
    "pre_eps dropped": ("mix", "sums[0] + pre_eps", "sums[0]"),
    "post_mult dropped": ("mix", "sums[0] * post_mult", "sums[0]"),
    "rms_eps dropped": ("mix", "sums[1] / rms_numel + rms_eps", "sums[1] / rms_numel"),
    "sinkhorn_eps dropped after softmax": (
        "mix",
        "(scales[j] * scales[j]) + sinkhorn_eps",
        "(scales[j] * scales[j])",
    ),
    "sinkhorn_eps dropped in the row step": ("mix", f"{ROW_SUM} + sinkhorn_eps", ROW_SUM),
    "sinkhorn_eps dropped in the column step": ("mix", f"{COLUMN_SUM} + sinkhorn_eps", COLUMN_SUM),
    "one iteration too few": ("mix", "T.serial(sinkhorn_repeat - 1)", "T.serial(sinkhorn_repeat - 2)"),
    "softmax without the max": ("mix", "T.exp(cm[j * HC + k] - top[0])", "T.exp(cm[j * HC + k])"),
    "NaN guard removed": ("mix", "if cm[0] >= 0.0:", "if sinkhorn_repeat > 0:"),
    "norm_eps dropped": ("collapse", NORM, "total[0] / hidden_size"),
    "norm_eps times 1000": ("collapse", NORM, "total[0] / hidden_size + 1000.0 * norm_eps"),
    "no bf16 rounding before the norm": (
        "collapse",
        'value[0] = T.cast(out[c, v], "float32") total[0]',
        "total[0]",
    ),
}


def mutated(text: str, name: str) -> str:
    """The text with that edit, whose place may span lines. Raises AssertionError where there is none."""
    if not name:
        return text
    _, old, new = MUTANTS[name]
    pattern = r"\s+".join(map(re.escape, old.split()))
    found = list(re.finditer(pattern, text))
    assert found, f"{name}: {old!r} is not in the kernels' text"
    return text[: found[-1].start()] + new + text[found[-1].end() :]
