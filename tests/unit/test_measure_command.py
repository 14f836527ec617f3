"""`dspark-tune measure` and `predict`, whole, on simulated engines: arms, clean and unclean levels, the gate.

What is replaced is the boot, which gives a simulated engine on a socket, and `vllm bench serve`, which gives
what that engine would have made it write; everything between is the real thing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_deploy.launch.engine import ReadyReport
from tests.support.cli import Tune
from tests.support.simulated_engine import SimulatedEngine, served
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, write
from tuning import measurement, statistics, summary
from tuning.commands import common
from tuning.load import LoadFailedError, read_result
from tuning.measurement import batch_shapes
from tuning.record import Record
from tuning.workload import TinyArithmetic

CHANCES = (0.8, 0.7, 0.6, 0.5)
GOLD = {question.prompt: question for question in TinyArithmetic().questions(60)}


class Answering(SimulatedEngine):
    """Answers the built-in language's questions rightly, but for `wrong` of them."""

    wrong = 0
    cut_off = 0
    hits = 0
    speculates = True

    def text_for(self, body: dict[str, Any]) -> str:
        question = GOLD.get(body["prompt"])
        if question is None:
            return self.text
        index = int(question.id.rpartition("-")[2])
        return "#### 999" if index < self.wrong else f"#### {question.gold}"

    def finish_for(self, body: dict[str, Any]) -> str:
        index = int(GOLD[body["prompt"]].id.rpartition("-")[2]) if body["prompt"] in GOLD else self.cut_off
        return "length" if index < self.cut_off else "stop"

    def page(self) -> str:
        queries = 100 * sum(counter["finished"] for counter in self.counters)
        cache = (
            f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {self.hits * queries}\n"
        )
        lines = super().page() if self.speculates else ""
        return lines + cache


class Farm:
    """Engines as they are booted, and what each command line asked of them."""

    def __init__(self) -> None:
        self.booted: list[tuple[Any, list[str], Answering]] = []
        self.load_fails = False
        self.prepare: Callable[[Any, Answering], None] = lambda profile, engine: None
        self._seeds = itertools.count()

    def start(self, loaded: Any, facts: Any, run: Any, extra: list[str]) -> Any:
        profile = loaded.profile
        k = profile.speculative.num_speculative_tokens if profile.speculative else 0
        engine = Answering(CHANCES[:k], step_ms=10 + 2 * k, prefill_ms=20, seed=next(self._seeds))
        engine.speculates = k > 0
        self.prepare(profile, engine)
        self.booted.append((profile, extra, engine))
        return _Booted(engine)

    def run_load(self, load: Any, *, url: str, **_: Any) -> Any:
        engine = next(one for _, _, one in self.booted if getattr(one, "url", "") == url)
        document = engine.bench(load.requests.count, load.concurrency, 40, **load.limits)
        if self.load_fails:
            raise LoadFailedError("2 requests failed; the first: ['boom']")
        return read_result(document, load.concurrency, load.rate)


class _Booted:
    def __init__(self, engine: Answering) -> None:
        self._engine, self._stack = engine, ExitStack()

    def __enter__(self) -> Any:
        url = self._stack.enter_context(served(self._engine))
        self._engine.url = url  # type: ignore[attr-defined]
        return SimpleNamespace(
            url=url, wait_ready=lambda: ReadyReport(url, 1.0, []), check_alive=lambda: None
        )

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Farm]:
    found = Farm()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(statistics, "RESAMPLES", 99)  # intervals have tests of their own
    monkeypatch.setattr(summary, "GAP_RESAMPLES", 9)
    monkeypatch.setattr(measurement, "Engine", found)
    monkeypatch.setattr(measurement, "run_load", found.run_load)
    monkeypatch.setattr(common, "probe", lambda profile: good_facts())
    write(tmp_path, TEXT.replace("num_speculative_tokens: 5", "num_speculative_tokens: 4"))
    yield found


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return Tune(monkeypatch, capsys)


MEASURE = ("measure", "--profile", "test.yaml", "--no-report", "--loads", "1,4", "--requests", "24")


def test_the_arms_their_levels_and_the_record(farm: Farm, tune: Tune) -> None:
    done = tune(
        *MEASURE,
        *("--accuracy-problems", 60, "--accuracy-margin", 0.1, "--rates", 2, "--boots", 2, "--out", "m"),
        *("--goodput", "ttft:1000,tpot:1000"),
    )
    assert done.code == 0, done.stderr
    arms = {arm["arm"]: arm for arm in done.document["result"]["arms"]}
    assert list(arms) == ["reference", "fused", "fixed", "adaptive"]
    profiles = [profile for profile, _, _ in farm.booted]
    assert profiles[0].mhc.provider == "torch" and profiles[0].speculative is None
    assert profiles[1].mhc.provider == "auto" and profiles[1].speculative is None
    assert profiles[2].speculative.verification.kind == "fixed"
    assert arms["adaptive"]["state"] == "failed" and arms["adaptive"]["reason"]
    assert len(farm.booted) == 6, "three arms that can run, twice each, taking turns"
    fixed = arms["fixed"]
    assert [load["level"] for load in fixed["loads"]] == ["load 1", "load 4", "2 requests/s"] * 2
    assert all(load["goodput_per_s"] > 0 and load["prefix_cache_reset"] for load in fixed["loads"])
    assert fixed["acceptance"]["length"] == pytest.approx(SimulatedEngine(CHANCES).length, rel=0.1)
    assert fixed["loads"][0]["acceptance"]["chunks_are_steps"] is True
    assert {row["level"] for row in fixed["over_boots"]} == {"load 1", "load 4", "2 requests/s"}
    for row in fixed["over_boots"]:
        assert row["interval"]["low"] < row["tpot_ms"] < row["interval"]["high"]
    assert arms["reference"]["loads"][0]["acceptance"] == {"length": 1.0}
    assert done.document["result"]["against_reference"]["fixed"]["verdict"] == "pass"
    assert fixed["accuracy_acceptance"]["per_request"]["requests"] == 60
    record = Record.read(Path("m/record.json"))
    assert record.as_json() == done.document
    assert record.engine is not None and len(record.engine.profile_sha256 or "") == 64
    assert tune(*MEASURE, "--out", "m").code == 2, "a record is never written over"
    compared = tune("compare", "m", "m", "--margin", 0.2)
    assert compared.code == 0 and [row["level"] for row in compared.document["result"]["speed"]]


def test_lost_accuracy_outweighs_any_speed(farm: Farm, tune: Tune) -> None:
    def worse(profile: Any, engine: Answering) -> None:
        if profile.speculative:
            engine.wrong, engine.step_ms = 30, 1.0

    farm.prepare = worse
    done = tune(*MEASURE, "--accuracy-problems", 60, "--arms", "reference,fixed")
    assert done.code == done.document["exit_code"] == 7
    assert "their speed doesn't count" in done.document["error"]
    assert done.document["result"]["against_reference"]["fixed"]["comparison"]["lost"] == 30


def test_answers_that_were_cut_off_are_wrong_and_said(farm: Farm, tune: Tune) -> None:
    def short(profile: Any, engine: Answering) -> None:
        engine.cut_off = 2 if profile.speculative else 0

    farm.prepare = short
    done = tune(*MEASURE, "--accuracy-problems", 60, "--arms", "reference,fixed", "--out", "m")
    assert done.document["result"]["against_reference"]["fixed"]["comparison"]["lost"] == 2
    assert "fixed: 2 of 60 answers were cut off and count as wrong" in done.stderr
    assert "reference: 0 of" not in done.stderr
    compared = tune("compare", "m", "m", "--arm", "fixed")
    assert compared.code == 2 and "2 of 60 answers were cut off" in compared.document["error"]


def test_levels_that_are_no_clean_measurement_say_so_and_have_no_numbers(farm: Farm, tune: Tune) -> None:
    def cached(profile: Any, engine: Answering) -> None:
        engine.hits = 1 if profile.speculative else 0

    farm.prepare = cached
    done = tune(*MEASURE, "--arms", "reference,fixed", "--accuracy-problems", 5, "--out", "hits")
    assert done.code == 0
    reference, fixed = done.document["result"]["arms"]
    assert reference["state"] == "complete" and fixed["state"] == "failed"
    assert all(not load["valid"] and "tpot_ms" not in load for load in fixed["loads"])
    assert "100.0% of the prompt tokens" in fixed["loads"][0]["reasons"][0]
    assert "fixed: not measured" in done.stderr
    farm.load_fails = True
    done = tune(*MEASURE, "--arms", "reference", "--accuracy-problems", 5, "--out", "failures")
    assert done.code == 1 and done.document["result"]["arms"][0]["state"] == "failed"
    assert Record.read(Path("failures/record.json")).status == "invalid"


def test_the_seed_protocol_gives_latency_and_ranks_nothing(farm: Farm, tune: Tune) -> None:
    done = tune("measure", "--profile", "test.yaml", "--no-report", "--workload", "random", "--arms", "fixed")
    result, workload = done.document["result"], done.document["workload"]
    assert (result["loads"], result["requests"], result["ranks_k"]) == ([1], 8, False)
    assert workload["sampling"] == {"temperature": 0.0, "max_tokens": 1024, "ignore_eos": True}
    assert result["verdicts"] == [] and "nothing here ranks k" in done.stderr


def test_warm_up_prompts_are_nobody_elses_and_cover_the_shapes(farm: Farm, tune: Tune) -> None:
    tune(*MEASURE, "--arms", "fixed", "--accuracy-problems", 10)
    ((profile, _, engine),) = farm.booted
    prompts = [body["prompt"] for body in engine.requests_seen]
    warm = [body for body in engine.requests_seen if body.get("ignore_eos")]
    assert len(warm) == sum(batch_shapes(profile, 4)) == 7
    assert len(set(prompts)) == len(prompts) == 7 + 8 + 10
    workload = TinyArithmetic()
    others = {q.prompt for q in workload.questions(10)} | set(workload.load_prompts(0, 24))
    assert not {body["prompt"] for body in warm} & others


def test_predict_and_its_check(farm: Farm, tune: Tune) -> None:
    done = tune(
        *("predict", "--profile", "test.yaml", "--num-speculative-tokens", "1,2,3", "--loads", "1,4"),
        *("--requests", "150", "--check"),
    )
    assert done.code == 0, done.stderr
    result = done.document["result"]
    synthetic = [extra for _, extra, _ in farm.booted if extra]
    assert len(synthetic) == 3 and len(farm.booted) == 7
    config = json.loads(synthetic[1][1])
    assert config["rejection_sample_method"] == "synthetic" and len(config["synthetic_acceptance_rates"]) == 2
    assert [row["k"] for row in result["errors"]] == [1, 1, 2, 2, 3, 3]
    assert all(abs(row["acceptance_length_error"]) < 0.05 for row in result["errors"])
    # The simulated chain is the same whatever k is, which predict assumes, so only noise is left.
    assert all(abs(row["tpot_error"]) < 0.08 for row in result["errors"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predict", "--num-speculative-tokens", "9"], "largest k"),
        (["predict", "--num-speculative-tokens", "1", "--workload", "random"], "never ranks k"),
        (["measure", "--arms", "fixed,quick"], "'quick' is none of"),
        (["measure", "--goodput", "speed:3"], "ttft:2000"),
        (["measure", "--rates", "-1"], "above 0"),
        (["measure", "--loads", "1,x"], "write it as 1,3,5"),
        (["measure", "--workload", "jsonl"], "--data PATH"),
        (["measure", "--workload", "nothing"], "known: tiny-arithmetic"),
        (["measure", "--set", "engine.args.max-model-len=96"], "wants 97 tokens or more"),
        (["measure", "--workload", "random", "--set", "engine.args.max-model-len=2047"], "wants 2048 tokens"),
        (["predict", "--num-speculative-tokens", "1", "--set", "engine.args.max-model-len=9"], "wants 97"),
    ],
)
def test_bad_input_says_what_to_do(farm: Farm, tune: Tune, arguments: list[str], says: str) -> None:
    done = tune(arguments[0], "--profile", "test.yaml", *arguments[1:])
    assert done.code == 2 and says in done.document["error"]
    assert not farm.booted, "found before anything was booted"
