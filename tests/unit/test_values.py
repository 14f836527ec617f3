"""Flags whose values no vLLM takes are refused with their line; those that it takes pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.findings import ARGS, change, findings

IMPOSSIBLE = [
    *(
        f"gpu-memory-utilization={value}"
        for value in ("0", "-0.1", "1.01", "90", "high", "true", "nan", "[1]")
    ),
    *(
        f"{name}={value}"
        for name in (
            "max-num-seqs",
            "max-num-batched-tokens",
            "max-model-len",
            "tensor-parallel-size",
            "pipeline-parallel-size",
            "data-parallel-size",
            "block-size",
        )
        for value in ("0", "-2", "1.5", "many", "true", "[1]")
    ),
    "max-num-seqs=1k",
    "max-num-seqs=-1",
    "max-model-len=1.5K",
    "max-model-len=0k",
    "max-num-batched-tokens=auto",
    "cudagraph-capture-sizes=[1, 0]",
    "cudagraph-capture-sizes=[1, x]",
    "cudagraph-capture-sizes=[1.5]",
    "cudagraph-capture-sizes=[]",
    "cudagraph-capture-sizes=1 2 4",
    "seed=--config",
    "middleware=[some.module, --config]",
    "compilation-config=FULL",
    "compilation-config='{mode: 3}'",
]
POSSIBLE = [
    "gpu-memory-utilization=1",
    "gpu-memory-utilization='0.9'",
    "gpu-memory-utilization=null",
    "max-num-seqs='8'",
    "max-model-len=25.6k",
    "max-model-len=1M",
    "max-model-len=auto",
    "max-model-len=-1",
    "max-num-batched-tokens=8K",
    "block-size=256",
    "cudagraph-capture-sizes=[6, 12]",
    "compilation-config={mode: 3}",
    "compilation-config=3",
    """compilation-config='{"mode": 3}'""",
    """kv-transfer-config='{"cpu_bytes_to_use": 80m, "name": "1k"}'""",
]


def said(folder: Path, *flags: str) -> list[str]:
    """The codes about values for these flags, each of which must have a place."""
    found = findings("mi355x", change(*(ARGS + flag for flag in flags)), folder)
    found = [finding for finding in found if finding.code in ("VALUE_IMPOSSIBLE", "GPUS_TOO_FEW")]
    assert all(finding.where for finding in found)
    return [finding.code for finding in found]


@pytest.mark.parametrize("flag", IMPOSSIBLE)
def test_a_value_that_vllm_cannot_take(tmp_path: Path, flag: str) -> None:
    assert said(tmp_path, flag) == ["VALUE_IMPOSSIBLE"]


@pytest.mark.parametrize("flag", POSSIBLE)
def test_a_value_that_vllm_takes(tmp_path: Path, flag: str) -> None:
    assert said(tmp_path, flag) == []


def test_a_flag_beside_its_opposite(tmp_path: Path) -> None:
    assert said(tmp_path, "enforce-eager=true", "no-enforce-eager=true") == ["VALUE_IMPOSSIBLE"]
    assert said(tmp_path, "no-enforce-eager=true") == []
    assert said(tmp_path, "enforce-eager=null", "no-enforce-eager=true") == []


@pytest.mark.parametrize(
    ("tensor", "pipeline", "nodes", "enough"),
    [("4", 1, 1, True), ("8", 1, 1, False), ("'8'", 1, 1, False), ("4", 2, 2, True), ("4", 3, 2, False)],
)
def test_gpus_for_every_rank(tmp_path: Path, tensor: str, pipeline: int, nodes: int, enough: bool) -> None:
    flags = (f"tensor-parallel-size={tensor}", f"pipeline-parallel-size={pipeline}", f"nnodes={nodes}")
    assert said(tmp_path, *flags) == ([] if enough else ["GPUS_TOO_FEW"])


@pytest.mark.parametrize(
    ("argument", "code"),
    [
        (f"generation-config=hf_{'a' * 24}", "PASSWORD_IN_COMMAND"),
        ("override-generation-config={note: 'api_key=s3cret'}", "SECRET_IN_COMMAND"),
        ("generation-config=vllm", None),
    ],
)
def test_secrets_are_known_by_their_shape_under_any_flag(tmp_path: Path, argument: str, code: str | None):
    found = {finding.code for finding in findings("mi355x", change(ARGS + argument), tmp_path)}
    assert found & {"PASSWORD_IN_COMMAND", "SECRET_IN_COMMAND"} == ({code} if code else set())
