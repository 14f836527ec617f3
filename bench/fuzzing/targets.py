"""What is fuzzed: each reader of files and texts from outside, with its seeds.

A reader may give a value or raise an error of our tree; anything else is a failure. Seeds are short samples
of what people and engines write, and studies that the stand-in engine filled. Not covered: readers of our own
run directories, which only our own processes write.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import yaml

from bench.fuzzing.mutation import misspelt, mutate
from dspark_deploy.errors import DSparkError
from dspark_deploy.preflight import Facts, check
from dspark_deploy.preflight.checkpoint import read_checkpoint
from dspark_deploy.profile import load_profile
from dspark_deploy.profile.document import parse_document
from tests.support.stand_in import StandIn
from tests.support.sweeps import sweep
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load
from tuning.acceptance import acceptance_between, parse_metrics
from tuning.acceptance_log import read_log as read_acceptance_log
from tuning.accuracy import AccuracyRun
from tuning.gsm8k.completions import read_completions
from tuning.gsm8k.dataset import _rows
from tuning.gsm8k.extraction import flexible, strict, upstream
from tuning.identity import identity
from tuning.jit_log import read_log as read_jit_log
from tuning.opening import Options, open_sweep
from tuning.space import cut
from tuning.storage import SqliteStorage, naming_a_lost_storage
from tuning.trials import stored_identity
from tuning.workload import sweep_workload

optuna.logging.set_verbosity(optuna.logging.ERROR)


class AcceptedTypo(Exception):  # it is a finding, raised to be saved like the others
    """A misspelt key was taken without a word."""


@dataclass(frozen=True)
class Target:
    """`run` reads one input; `typo` draws a document with a misspelt key, which `run` must refuse."""

    name: str
    seeds: Sequence[bytes]
    run: Callable[[bytes], Any]
    typo: Callable[[random.Random], bytes] | None = None
    share: float = 1.0

    def draw(self, draw: random.Random) -> tuple[bytes, bool]:
        """One input, and whether it must be refused."""
        if self.typo is not None and draw.random() < 0.1:
            return self.typo(draw), True
        return mutate(self.seeds, draw), False

    def check_seeds(self) -> None:
        """Read each seed: one that is refused tests the refusal alone. Raises DSparkError."""
        for seed in self.seeds:
            self.run(seed)

    def attempt(self, data: bytes, refuse: bool) -> None:
        """Read one input. Raises what the reader raises, and AcceptedTypo."""
        try:
            self.run(data)
        except DSparkError:
            return
        if refuse:
            raise AcceptedTypo(data[:200])


FREE = [("engine", "args"), ("engine", "env")]
FREE_FACTS = [("versions",), ("features",), ("environment",), ("model", "config"), ("draft", "config")]
SAMPLE = """\
name: sample
description: A whole one
model: {path: org/name, served_name: tiny, family: deepseek_v4}
hardware: {platform: rocm, arch: gfx950, gpus: 4}
engine:
  vllm: ">=0.26,<0.40"
  host: 127.0.0.1
  args: {max-num-seqs: 64, tensor-parallel-size: 4, enforce-eager: false, compilation-config: {mode: 3}}
  env: {HF_TOKEN: "${HF_TOKEN}", VLLM_ROCM_USE_AITER: "1"}
speculative:
  num_speculative_tokens: 5
  verification: {kind: schedule, per_batch_size: [[1, 4, 5], [5, 64, 2]]}
mhc: {provider: auto, gate: refuse}
expect:
  - {workload: tiny-arithmetic, acceptance_length: [3.5, 6.0], accuracy: [0.6, 0.97], source: here}
  - {workload: random, temperature: 0, thinking: false, concurrency: 8, tpot_ms: [1, 9.5]}
"""
SPACE = """\
sweep:
  space:
    num_speculative_tokens: [none, 1, 3, 5]
    draft_sample_method: [greedy, probabilistic]
    verification: [fixed, adaptive, schedule, {kind: schedule, per_batch_size: [[1, 64, 3]]}]
    rejection_sample_method: [standard, block]
    dspark_draft_topk: [all, 8]
    capture_sizes: [rendered, 64, [6, 12]]
    max_num_seqs: [16, 64]
    max_num_batched_tokens: [2048]
    mhc_provider: [auto]
  loads: [1, 8]
  slo: {tpot_ms: 30.5, ttft_ms: 2000}
  sampler: auto
"""
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="tiny"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 500.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 250.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"} 100.0
vllm:prefix_cache_queries_total{engine="0"} 12
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.5"} 3
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 4
"""
JIT_LOG = """\
INFO 12-02 08:11:06 [x.py:1] Model loading took 1 GiB
dspark-deploy jit: library=tilelang kernel=post phase=capture tokens=5 seconds=1.25 source=compiled key=(4, 5)
dspark-deploy jit: library=tilelang kernel=pre phase=serving tokens=12 seconds=0.1 source=disk key=1 refused=1
TileLang begins to compile kernel `mhc_fused` with out_idx=[3]
[aiter] start build [module_mhc] under /root/.aiter
waiting for baton release at /root/.aiter/jit/build/lock_module
Triton kernel JIT compilation during inference: _kernel (1, 2)
Capturing CUDA graphs (decode, FULL)
Graph capturing finished in 3 secs
Application startup complete.
"""
ENGINE_LOG = """\
INFO [metrics.py:1] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 1.00 tokens/s, \
Drafted throughput: 2.00 tokens/s, Accepted: 15 tokens, Drafted: 20 tokens, \
Per-position acceptance rate: 0.900, 0.600, Avg Draft acceptance rate: 75.0%
"""
GSM8K = """\
{"question": "Ben has 21 pens. He buys 13. How many?", "answer": "21 + 13 = <<21+13=34>>34\\n#### 34"}
{"question": "How much?", "answer": "It costs $1,234.50.\\n#### -1,234.50"}
"""
ANSWERS = """\
{"id": "q0", "gold": "34", "completion": "<think>21 + 13</think> 34\\n#### 34", "finish_reason": "stop"}
{"id": "q1", "gold": "5", "text": "about 4\\n\\nQ: next", "finish_reason": "length", "tokens": 5}
"""
ITEMS = """\
{"id": "q", "gold": "3", "answer": "3", "correct": true, "state": "answered", "text": "3", "histogram": [1]}
"""


def file_target(
    folder: Path, name: str, seeds: Sequence[str | bytes], read: Callable[[Path], Any], **more: Any
) -> Target:
    """A target whose reader wants a file."""
    file = folder / name

    def run(data: bytes) -> None:
        file.write_bytes(data)
        read(file)

    data = [each.encode() if isinstance(each, str) else each for each in seeds]
    return Target(name, data, run, **more)


def safetensors(header: bytes) -> bytes:
    """A file with this header and nothing behind it."""
    return struct.pack("<Q", len(header)) + header


def checkpoint_target(
    folder: Path, name: str, file: str, seeds: Sequence[bytes], others: dict[str, bytes]
) -> Target:
    """One file of a checkpoint's folder, beside whole ones."""
    place = folder / name
    place.mkdir()
    for other, data in others.items():
        (place / other).write_bytes(data)

    def run(data: bytes) -> None:
        (place / file).write_bytes(data)
        found = read_checkpoint(str(place))
        json.dumps(found.config), found.trained_block
        check(PROFILE, good_facts(model=found, draft=found))

    return Target(name, seeds, run, share=3.0)


with tempfile.TemporaryDirectory() as made:
    PROFILE = load(Path(made), SAMPLE)


def profile_typo(text: str, free: Sequence[tuple[str, ...]]) -> Callable[[random.Random], bytes]:
    """Draws the profile with one key misspelt."""

    def draw(chance: random.Random) -> bytes:
        document = yaml.safe_load(text)
        misspelt(document, free, chance)
        return yaml.safe_dump(document).encode()

    return draw


def facts_typo(chance: random.Random) -> bytes:
    """The facts with one key misspelt."""
    document = good_facts().as_json()
    misspelt(document, FREE_FACTS, chance)
    return json.dumps(document).encode()


def study_target(folder: Path, kind: str, share: float) -> Target:
    """A sweep's study in a file, opened and read as a sweep does that goes on with it."""
    place = folder / kind
    place.mkdir()
    url = f"{kind}:///{place}/study"
    swept = sweep(place, StandIn(), storage=url, sets=["sweep.accuracy_problems=4"]).campaign
    seed = (place / "study").read_bytes()
    known = identity(swept.loaded, swept.facts, sweep_workload("tiny-arithmetic").fingerprint())

    def run(data: bytes) -> None:
        (place / "study").write_bytes(data)
        options = Options(storage=url)
        opened = open_sweep(
            place,
            "test",
            known,
            swept.space,
            options,
            sampler="grid",
            trials=None,
            violation_of=lambda *_: 0.0,
        )
        try:
            with naming_a_lost_storage(url):
                study = opened.study
                ended = [*study.outcomes(), *study.owed(), *study.running(), *study.pareto()]
                [each.label for each in ended], stored_identity(study.study)
        finally:
            if isinstance(opened.storage, SqliteStorage):
                opened.storage.engine.dispose()

    return Target(f"study-{kind}", [seed], run, share=share)


def targets(folder: Path) -> list[Target]:
    """Every target; files are written below `folder`."""
    header = json.dumps(
        {"mtp.0.x": {"dtype": "F8", "shape": [2], "data_offsets": [0, 2]}, "__metadata__": {}}
    ).encode()
    index = json.dumps({"metadata": {"total_size": 2}, "weight_map": {"a": "m.safetensors"}}).encode()
    config = json.dumps(
        {"model_type": "deepseek_v4", "dspark_block_size": 5, "vocab_size": 129280, "hc_mult": 4}
    ).encode()
    whole = {"config.json": config, "m.safetensors": safetensors(header)}
    facts = json.dumps(good_facts().as_json())
    earlier = parse_metrics(METRICS)
    return [
        file_target(
            folder, "profile", [TEXT, SAMPLE], load_profile, typo=profile_typo(SAMPLE, FREE), share=2.0
        ),
        file_target(
            folder,
            "search-space",
            [TEXT + SPACE],
            lambda path: cut((found := load_profile(path)).profile.sweep.space, found, good_facts()),
            typo=profile_typo(TEXT + SPACE, FREE),
            share=1.0,
        ),
        Target(
            "yaml",
            [SAMPLE.encode(), SPACE.encode()],
            lambda data: parse_document(data.decode("latin-1"), "x"),
        ),
        file_target(
            folder,
            "facts",
            [facts],
            lambda path: check(PROFILE, Facts.from_file(path)),
            typo=facts_typo,
            share=2.0,
        ),
        checkpoint_target(folder, "config", "config.json", [config], whole),
        checkpoint_target(folder, "safetensors", "m.safetensors", [safetensors(header)], whole),
        checkpoint_target(folder, "index", "model.safetensors.index.json", [index], whole),
        Target(
            "metrics",
            [METRICS.encode()],
            lambda data: acceptance_between(earlier, parse_metrics(data.decode("utf-8", "replace"))),
            share=4.0,
        ),
        file_target(folder, "jit-log", [JIT_LOG], read_jit_log, share=4.0),
        file_target(folder, "engine-log", [ENGINE_LOG], read_acceptance_log, share=4.0),
        file_target(folder, "gsm8k-data", [GSM8K], _rows, share=4.0),
        file_target(
            folder, "gsm8k-answers", [ANSWERS], lambda path: read_completions(path, "strict-8shot"), share=3.0
        ),
        Target(
            "gsm8k-texts",
            [*ANSWERS.encode().splitlines(), b"It is $1,234.50 in all.\n#### 1,234.50"],
            lambda data: [read(data.decode("utf-8", "replace")) for read in (strict, flexible, upstream)],
            share=4.0,
        ),
        file_target(folder, "items", [ITEMS], AccuracyRun.read, share=4.0),
        study_target(folder, "journal", 1.0),
        study_target(folder, "sqlite", 0.1),
    ]
