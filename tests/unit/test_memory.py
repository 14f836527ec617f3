"""Out of memory under load: the one setting that caused it is lowered, once, and that is written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_deploy.errors import EngineDiedError, EngineStartError
from dspark_deploy.profile import load_profile
from tests.support.stand_in import StandIn
from tests.support.sweeps import SWEEP, sweep
from tests.unit.profiles import TEXT, load
from tuning.memory import lowered

SAMPLER = """\
(EngineCore pid=7) ERROR 12-02 10:00:00 [core.py:900] Traceback (most recent call last):
  File "/opt/vllm/v1/worker/gpu/model_runner.py", line 10, in execute_model
  File "/opt/vllm/v1/worker/gpu/spec_decode/rejection_sampler.py", line 22, in forward
torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 288 GiB
"""
LAYERS = SAMPLER.replace("spec_decode/rejection_sampler", "models/deepseek_v4/moe")
SIZED = SWEEP.replace("  port: 8123", "  port: 8123\n  args: {max-num-seqs: 16, max-num-batched-tokens: 512}")


@pytest.mark.parametrize(
    ("log", "args", "platform", "expected"),
    [
        (SAMPLER, "{max-num-seqs: 16, max-num-batched-tokens: 512}", "rocm", ("max-num-seqs", 16, 8)),
        (
            LAYERS,
            "{max-num-seqs: 16, max-num-batched-tokens: 512}",
            "rocm",
            ("max-num-batched-tokens", 512, 256),
        ),
        (LAYERS, "{max-num-seqs: 16}", "rocm", ("gpu-memory-utilization", 0.92, 0.87)),
        (SAMPLER, "{gpu-memory-utilization: 0.8}", "cuda", ("gpu-memory-utilization", 0.8, 0.75)),
        (SAMPLER, "{max-num-seqs: 1}", "cpu", None),
        ("RuntimeError: something else\n", "{max-num-seqs: 16}", "rocm", None),
    ],
)
def test_the_frame_says_which_setting(
    tmp_path: Path, log: str, args: str, platform: str, expected: tuple[str, float, float] | None
) -> None:
    file = tmp_path / "engine.log"
    file.write_text("INFO all is well\n" * 50 + log + "INFO leaving\n")
    text = TEXT.replace("port: 8123", f"port: 8123\n  args: {args}").replace("cpu", platform)
    found = lowered(load(tmp_path, text), file)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.setting, found.before, found.after) == expected
        assert "OutOfMemoryError" in found.evidence and found.why


def test_a_log_that_is_not_there_lowers_nothing(tmp_path: Path) -> None:
    assert lowered(load(tmp_path), tmp_path / "engine.log") is None


def test_it_is_lowered_once_recorded_and_served_as_measured(tmp_path: Path) -> None:
    engine = StandIn(breaks={"k5-greedy": [EngineDiedError("it died")]}, log_text=SAMPLER)
    done = sweep(tmp_path, engine, SIZED)
    assert engine.launched.count("k5-greedy") == 2
    cell = next(each for each in done.result["cells"] if each["configuration"] == "k5-greedy")
    assert cell["state"] == "complete"
    assert (cell["lowered"]["setting"], cell["lowered"]["before"], cell["lowered"]["after"]) == (
        "max-num-seqs",
        16,
        8,
    )
    assert "rejection_sampler.py" in cell["lowered"]["why"]
    seen = [p.profile.engine.args["max-num-seqs"] for p in engine.profiles]
    assert seen.count(8) == 1, "no other configuration pays for it"
    assert done.result["best"] == "k5-greedy"
    assert load_profile(tmp_path / "out" / "best.yaml").profile.engine.args["max-num-seqs"] == 8
    assert "out of memory under load, so max-num-seqs went from 16 to 8" in done.text


def test_a_second_time_it_has_failed(tmp_path: Path) -> None:
    engine = StandIn(
        breaks={"k5-greedy": [EngineDiedError("it died"), EngineDiedError("it died again")]}, log_text=SAMPLER
    )
    done = sweep(tmp_path, engine, SIZED)
    cell = next(each for each in done.result["cells"] if each["configuration"] == "k5-greedy")
    assert cell["state"] == "failed" and cell["lowered"]["after"] == 8
    assert engine.launched.count("k5-greedy") == 2


def test_an_engine_that_never_served_is_not_lowered(tmp_path: Path) -> None:
    engine = StandIn(breaks={"k5-greedy": [EngineStartError("no memory")]}, log_text=SAMPLER)
    sweep(tmp_path, engine, SIZED)
    assert engine.launched.count("k5-greedy") == 1
