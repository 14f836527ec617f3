"""GSM8K as a workload of sweep and measure: what is asked under load, how accuracy is asked and voided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_deploy.errors import InputError
from tests.support.commands import Command
from tests.support.shared import gsm8k_folder
from tests.support.simulated_engine import SimulatedEngine
from tests.support.stand_in import StandIn
from tests.support.sweeps import make
from tuning import measurement
from tuning.accuracy import AccuracyVoidError, run_accuracy
from tuning.endpoint import Endpoint
from tuning.gsm8k import dataset
from tuning.gsm8k.workload import Gsm8k
from tuning.workload import find_workload, sweep_workload


def rows(first: int, count: int) -> str:
    """Problems in GSM8K's form, the answer of number i being i."""
    lines = [
        {"question": f"What is {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(first, first + count)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of forty made-up problems that passes for the pinned one."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    (folder / "train.jsonl").write_text(rows(1000, 8))
    (folder / "test.jsonl").write_text(rows(0, 40))
    found = dataset.load_gsm8k(str(folder), allow_other=True)
    monkeypatch.setattr(dataset, "SHOTS_SHA256", found.shots_sha256)
    monkeypatch.setattr(dataset, "TEST_SHA256", found.test_sha256)
    return folder


def test_levels_send_other_questions_alone_and_accuracy_has_the_shots(data: Path) -> None:
    found = find_workload("gsm8k", data)
    assert found.name == "gsm8k/strict-8shot" and found.ranks_k
    warm = found.warm_up_prompts(4)
    sent = [prompt for level in (0, 1) for prompt in found.requests(level, 8).prompts]
    assert sent[0] == "Question: What is 0?\nAnswer:"
    assert len({*sent, *warm}) == 20, "no prompt comes twice"
    asked = found.questions(2)
    assert [question.gold for question in asked] == ["0", "1"]
    assert asked[0].prompt.count("Answer:") == 9


def test_it_is_asked_as_the_protocol_asks_and_voided_by_its_rule(data: Path) -> None:
    found = find_workload("gsm8k/vllm-8shot", data)
    engine = SimulatedEngine(text="the answer is 3")
    with Endpoint("http://e", "m", engine.transport()) as endpoint:
        ask = found.asker(endpoint)
        assert ask is not None
        run = run_accuracy(found.questions(10), ask, concurrency=2)
    assert run.counts()["correct"] == 1
    assert {body["max_tokens"] for body in engine.requests_seen} == {256}
    assert "Assistant:" in engine.requests_seen[0]["stop"]
    assert found.void_reasons(run) == []


def test_another_protocol_is_another_workload(data: Path) -> None:
    names = ("gsm8k", "gsm8k/vllm-8shot")
    assert len({find_workload(name, data).fingerprint() for name in names}) == 2
    assert isinstance(sweep_workload("gsm8k", str(data)), Gsm8k)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("gsm8k", None, "--data"),
        ("gsm8k/thinking", "data", "draws by chance"),
        ("gsm8k/none", "data", "is none of"),
        ("gsm8k", "elsewhere", "needs test.jsonl"),
        ("sharegpt", "data", "a sweep needs answers"),
    ],
)
def test_what_a_sweep_refuses(data: Path, name: str, given: str | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        sweep_workload(name, str(data) if given == "data" else given)


def test_a_sweep_on_gsm8k_whole_but_for_the_engine(tmp_path: Path) -> None:
    arguments = ["sweep", "--profile", "cpu-tiny.yaml", "--num-speculative-tokens", "none", "--loads", "1,2"]
    arguments += ["--workload", "gsm8k", "--data", str(gsm8k_folder()), "--accuracy-problems", "60"]
    arguments += ["--prompts-per-load", "4", "--boots", "0", "--no-report", "--out", "out"]
    arguments += ["--set", "engine.stop_timeout_s=1", "--set", "engine.args.max-model-len=1024"]
    ended = Command(tmp_path, "tune", *arguments).end()
    assert ended.code == 0, ended.stderr
    cell = ended.document["cells"][0]
    # The stand-in answers 7 to everything, which is right for some of GSM8K's first questions.
    items = [
        json.loads(line) for line in (tmp_path / "out/cells/none/accuracy.jsonl").read_text().splitlines()
    ]
    assert cell["accuracy_counts"]["correct"] == sum(item["gold"] == "7" for item in items) > 0
    assert ended.document["settings"]["workload"] == "gsm8k"


@pytest.mark.parametrize(
    ("workload", "sets", "says"),
    [
        ("gsm8k", ["engine.args.max-model-len=256"], "max-model-len is 256, and .* wants 513 tokens"),
        ("gsm8k", ["engine.args.max-model-len=512"], "an accuracy question"),
        ("tiny-arithmetic", ["engine.args.max-model-len=96"], "wants 97 tokens .* of its load levels"),
        ("gsm8k", ["sweep.accuracy_problems=41"], "gsm8k/strict-8shot has 40 questions"),
    ],
)
def test_what_cannot_fit_is_refused_before_a_boot(
    tmp_path: Path, data: Path, workload: str, sets: list[str], says: str
) -> None:
    engine = StandIn()
    given = [f"sweep.workload={workload}", "sweep.accuracy_problems=40", *sets]
    given += [f"sweep.data={data}"] if workload == "gsm8k" else []
    with pytest.raises(InputError, match=says):
        make(tmp_path, engine, sets=given)
    assert engine.launched == [] and not (tmp_path / "out" / "study.db").exists()


def test_what_fits_by_a_token_is_let_through(tmp_path: Path, data: Path) -> None:
    sets = ["sweep.workload=gsm8k", f"sweep.data={data}", "sweep.accuracy_problems=40"]
    make(tmp_path, StandIn(), sets=[*sets, "engine.args.max-model-len=513"])
    make(tmp_path, StandIn(), sets=[*sets, "engine.args.max-model-len=1k"], name="words")


@pytest.mark.parametrize("name", ["tiny-arithmetic", "random"])
def test_data_for_a_workload_that_reads_none(data: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"reads no file; leave --data"):
        find_workload(name, data)


def test_answers_that_the_protocol_calls_void_have_no_accuracy(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_workload("gsm8k", data)
    monkeypatch.setattr(type(found), "void_reasons", lambda self, run: ["9 of 10 answers were cut off"])
    session = object.__new__(measurement._Session)
    session._workload, session._plan = (
        found,
        measurement.Plan(loads=[1], requests=1, output_tokens=8, temperature=0.0, accuracy_problems=2),
    )
    engine = SimulatedEngine(text="#### 0")
    with Endpoint("http://e", "m", engine.transport()) as endpoint:
        session._endpoint = endpoint
        session._scrape = lambda: None  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(AccuracyVoidError, match="9 of 10"):
            session.measure_accuracy(lambda phase: None)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [("gsm8k/tiny-0shot", "tiny", "tiny-arithmetic"), ("gsm8k", "tiny", "doesn't go with")],
)
def test_the_tiny_checkpoints_problems_are_another_workload(name: str, data: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        find_workload(name, Path(data))
