"""Cases with known right answers, and GSM8K, where they lie beside the checkout; skipped where they don't."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("DSPARK_SHARED", Path(__file__).resolve().parents[3] / "shared"))


def case(name: str) -> Path:
    """A case's file; the test is skipped where there is none."""
    path = SHARED / "cases" / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    return path


def case_json(name: str) -> Any:
    """A case as JSON."""
    return json.loads(case(name).read_text())


def gsm8k_folder() -> Path:
    """GSM8K's folder; the test is skipped where there is none."""
    folder = SHARED / "data" / "gsm8k"
    if not (folder / "test.jsonl").exists():
        pytest.skip("GSM8K is not beside this checkout")
    return folder
