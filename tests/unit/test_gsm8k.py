"""GSM8K: data pinned by hash, protocols as they are published, readings, void runs, runs that resume."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from dspark_deploy.errors import InputError
from tests.support.cli import Tune
from tests.support.shared import case, gsm8k_folder
from tests.support.simulated_engine import SimulatedEngine, served
from tuning.accuracy import AccuracyRun, AccuracyVoidError, Item, state_of
from tuning.endpoint import Answer, Endpoint
from tuning.gsm8k.dataset import load_gsm8k
from tuning.gsm8k.extraction import flexible, normalized, strict, upstream
from tuning.gsm8k.protocols import PROTOCOLS, find_protocol
from tuning.gsm8k.run import run_in_folder, summary, void_reasons
from tuning.record import Record
from tuning.workload import Question, TinyArithmetic


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return Tune(monkeypatch, capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data in GSM8K's form: 10 training items, 30 questions."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in (("train-head.jsonl", 10), ("test.jsonl", 30)):
        rows = [{"question": f"{name} {i}?", "answer": f"<<{i}>>\n#### {i}"} for i in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_case_09_by_function_and_by_command(tune: Tune, tmp_path: Path) -> None:
    file = case("09-gsm8k-completions.jsonl")
    expected = [json.loads(line) for line in file.read_text().splitlines()]
    done = tune("gsm8k", "score", file, "--out", tmp_path / "scored")
    assert done.code == done.document["exit_code"] == 1, "two of seven were truncated: over 1 %"
    assert "2 of 7 answers were cut off" in done.document["error"]
    assert (done.document["kind"], done.document["formulas"]) == ("gsm8k", 1)
    result = done.document["result"]
    for row, item in zip(expected, result["scored"], strict=True):
        assert (item["answer"], int(item["correct"])) == (row["expect_pred"], row["expect_correct"]), row
    assert result["counts"]["truncated"] == 2 and result["accuracy"] is None
    stored = Record.read(tmp_path / "scored" / "record.json")
    assert stored.status == "invalid" and stored.result == result and stored.engine is None
    compared = tune("compare", tmp_path / "scored", tmp_path / "scored")
    assert compared.code == 2 and "the run is void" in compared.document["error"]


@pytest.mark.parametrize(
    ("text", "by_strict", "by_flexible", "by_upstream"),
    [
        ("so it costs 72 dollars, all in.", None, "72", "72"),
        ("profit is $70,000.", None, "70000", "70000"),
        ("it costs $29.00.", None, "29", "0"),
        ("a loss of -12", None, "-12", "12"),
        ("#### 96\n\nQuestion: 3 buses?\nAnswer: 120\n#### 120", "96", "96", "120"),
        ("96 jars.\n\nQuestion: 3 buses?\nAnswer: 120", None, "96", "120"),
        ("<think>#### 5</think>\n#### 11", "11", "11", "11"),
        ("<think>6 times 9 is 54", None, None, "54"),
        ("agent 007", None, "7", None),
        ("#### none", None, None, None),
        ("", None, None, None),
    ],
)
def test_readings(text: str, by_strict: str, by_flexible: str, by_upstream: str) -> None:
    assert (strict(text), flexible(text), upstream(text)) == (by_strict, by_flexible, by_upstream)


def test_upstreams_reading_is_upstreams(data: Path) -> None:
    """Held against upstream's two lines as they stand in its script: digits, then Python's own literals."""
    import ast
    import re

    for text in ("7", "1,234", "x 10 y 20.", "0", "00", "05", "3.50", "no", "-4"):
        digits = re.findall(r"\d+", text.replace(",", ""))
        try:
            theirs = str(ast.literal_eval(digits[-1])) if digits else None
        except SyntaxError:
            theirs = None
        assert upstream(text) == theirs, text


def test_numbers_have_one_form() -> None:
    assert [normalized(text) for text in ("29.00", "$1,000.", "-0", "1e400000", "NaN", "100")] == [
        "29",
        "1000",
        "0",
        normalized("1e400000"),
        None,
        "100",
    ]


def test_the_real_data_are_the_pinned_ones() -> None:
    found = load_gsm8k(str(gsm8k_folder()))
    assert found.pinned and len(found.shots) == 8 and len(found.test) == 1319
    assert all(row.gold for row in found.test)
    protocol = find_protocol("vllm-8shot")
    question = protocol.questions(found, 1)[0]
    assert question.prompt.startswith("Question: Natalia sold clips to 48 of her friends")
    assert question.prompt.count("\nAnswer:") == 9 and question.prompt.endswith("\nAnswer:")
    assert sum(upstream(row.answer) != row.gold for row in found.test) == 2, "two answers are negative"
    assert all(
        q.gold == upstream(r.answer) for q, r in zip(protocol.questions(found, None), found.test, strict=True)
    )


def test_the_tiny_checkpoints_own_problems(tune: Tune, tmp_path: Path) -> None:
    """What a machine without a GPU can run: prompts that fit the tiny pair, and answers that it learned."""
    protocol = find_protocol("tiny-0shot", "tiny")
    found = protocol.questions(load_gsm8k("tiny"), None)
    drawn = TinyArithmetic().questions(len(found))
    assert [(one.prompt, one.gold) for one in found] == [(one.prompt, one.gold) for one in drawn]
    engine = SimulatedEngine(text=f" so\n#### {found[0].gold}")
    with served(engine) as url:
        run = ["gsm8k", "run", "--data", "tiny", "--url", url, "--limit", 20, "--out", tmp_path / "out"]
        done = tune(*run, "--protocol", "tiny-0shot")
        assert done.code == 0 and done.document["result"]["data_pinned"] is False
        assert done.document["result"]["counts"]["correct"] == sum(
            q.gold == found[0].gold for q in found[:20]
        )
        assert {body["max_tokens"] for body in engine.requests_seen} == {96}
        wrong = tune(*run)
        assert wrong.code == 2 and "tiny-0shot" in wrong.document["error"]
    other = tune("gsm8k", "run", "--data", "x", "--url", "u", "--protocol", "tiny-0shot")
    assert other.code == 2 and "--data tiny" in other.document["error"]


def test_other_data_are_refused_unless_they_are_called_so(data: Path) -> None:
    with pytest.raises(InputError, match="the shots are not GSM8K's"):
        load_gsm8k(str(data))
    found = load_gsm8k(str(data), allow_other=True)
    assert not found.pinned and len(found.shots) == 8
    (data / "test.jsonl").write_text('{"question": "?", "answer": "no number"}\n')
    with pytest.raises(InputError, match=r"test.jsonl:1"):
        load_gsm8k(str(data), allow_other=True)
    with pytest.raises(InputError, match=r"needs test\.jsonl"):
        load_gsm8k(str(data / "nowhere"))
    with pytest.raises(InputError, match=r"pip install datasets|from the hub"):
        load_gsm8k("hub")


def test_protocols_send_what_they_publish(data: Path) -> None:
    shots = load_gsm8k(str(data), allow_other=True)
    sent = {}
    for name, protocol in PROTOCOLS.items():
        if protocol.tiny:
            continue
        engine = SimulatedEngine(text="#### 3")
        with Endpoint("http://e", "m", engine.transport()) as endpoint:
            item = protocol.asker(endpoint, {}, base_seed=100)(protocol.questions(shots, 4)[3])
        assert item.correct and item.strict == item.flexible == "3"
        (sent[name],) = engine.requests_seen
    theirs = sent["vllm-8shot"]
    assert (theirs["max_tokens"], theirs["temperature"], theirs["seed"]) == (256, 0.0, 42)
    assert theirs["stop"] == ["Question", "Assistant:", "<|separator|>"]
    assert sent["strict-8shot"]["max_tokens"] == 512 and "seed" not in sent["strict-8shot"]
    thinking = sent["thinking"]
    assert (thinking["max_tokens"], thinking["temperature"], thinking["top_p"]) == (16384, 1.0, 0.95)
    assert thinking["seed"] == 103 and "train-head" not in json.dumps(thinking["messages"])


def items(count: int, right: int = 0, **changes: object) -> AccuracyRun:
    fields: dict[str, object] = {"state": "answered", "text": "t", "finish_reason": "stop"} | changes
    return AccuracyRun([Item(f"q-{i}", "1", "1", i < right, **fields) for i in range(count)])  # type: ignore[arg-type]


def test_what_voids_a_run() -> None:
    plain, thinking = find_protocol("strict-8shot"), find_protocol("thinking")
    assert void_reasons(items(100, 90), plain) == []
    one_cut = AccuracyRun(items(99).items + items(1, finish_reason="length", state="truncated").items)
    two_cut = AccuracyRun(items(98).items + items(2, finish_reason="length", state="degenerate").items)
    assert void_reasons(one_cut, plain) == [] and "2 of 100" in void_reasons(two_cut, plain)[0]
    assert "1 requests failed" in void_reasons(AccuracyRun(items(1, state="error").items), plain)[0]
    assert "no answer shows thinking" in void_reasons(items(3), thinking)[0]
    assert void_reasons(items(3, reasoning="hm"), thinking) == []
    assert summary(two_cut, plain)["accuracy"] is None, "a void run has no number"


@pytest.mark.parametrize(
    ("text", "finish", "answer", "state"),
    [
        ("#### 7", "stop", "7", "answered"),
        ("no idea", "stop", None, "unparsed"),
        ("and then", "length", None, "truncated"),
        ("abc " * 40, "length", None, "degenerate"),
        ("7 " * 10, "stop", "7", "answered"),
        ("-" * 12, "stop", None, "unparsed"),
    ],
)
def test_states_of_an_answer(text: str, finish: str, answer: str | None, state: str) -> None:
    assert state_of(text, finish, answer) == state


def test_a_truncated_answer_has_no_number_except_in_upstreams_protocol() -> None:
    question, cut = Question("q-0", "", "54"), Answer("6 rows are 54, then", "", "length", 9)
    ours = find_protocol("strict-8shot").score(question, cut)
    theirs = find_protocol("vllm-8shot").score(question, cut)
    assert (ours.correct, ours.answer, ours.state) == (False, None, "truncated")
    assert (theirs.correct, theirs.answer, theirs.state) == (True, "54", "truncated")


QUESTIONS = [Question(f"q-{i}", f"prompt {i}", str(i)) for i in range(20)]


def test_an_interrupted_run_goes_on_and_loses_no_answer(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(question: Question) -> Item:
        asked.append(question.id)
        if len(asked) == 8:
            raise KeyboardInterrupt
        return Item(question.id, question.gold, question.gold, True, "answered", "t", "stop")

    seen: list[str] = []
    arguments = (tmp_path / "run", {"protocol": "p"}, QUESTIONS, ask, 1, lambda item: seen.append(item.id))
    with pytest.raises(KeyboardInterrupt):
        run_in_folder(*arguments)
    journal = tmp_path / "run" / "progress.jsonl"
    with journal.open("a") as handle:
        handle.write('{"id": "q-9", "gold":')  # the line that a crash cut off
    first, asked[:], seen[:] = list(asked), ["-"] * 8, []
    run = run_in_folder(*arguments)
    assert [item.id for item in run.items] == [question.id for question in QUESTIONS]
    assert len(seen) == 20 and all(run.correct)
    answered = set(first[:7])
    assert not answered & set(asked[8:]), "what was answered is not asked again"
    assert AccuracyRun.read(tmp_path / "run" / "items.jsonl") == run
    with pytest.raises(InputError, match="protocol differ"):
        run_in_folder(arguments[0], {"protocol": "another"}, *arguments[2:])


def test_a_failed_request_voids_and_keeps_what_was_answered(tmp_path: Path) -> None:
    engine = SimulatedEngine()

    def sometimes(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions" and b"prompt 13" in request.content:
            return httpx.Response(500, text="out of memory")
        return engine.handle(request)

    with Endpoint("http://e", "m", httpx.MockTransport(sometimes)) as endpoint:
        ask = find_protocol("strict-8shot").asker(endpoint, {}, 0)
        with pytest.raises(AccuracyVoidError, match="500: out of memory"):
            run_in_folder(tmp_path, {}, QUESTIONS, ask, 1, lambda item: None)
    kept = (tmp_path / "progress.jsonl").read_text().splitlines()
    assert len(kept) >= 13 and "error" not in {json.loads(line)["state"] for line in kept}


def test_the_command_runs_records_and_scores(tune: Tune, data: Path, tmp_path: Path) -> None:
    engine = SimulatedEngine(text="it is\n#### 3")
    with served(engine) as url:
        commands_on(engine, url, tune, data, tmp_path)


def commands_on(engine: SimulatedEngine, url: str, tune: Tune, data: Path, tmp_path: Path) -> None:
    run = ["gsm8k", "run", "--data", data, "--url", url, "--out", tmp_path / "out", "--limit", "5"]
    refused = tune(*run)
    assert refused.code == 2 and "--allow-other-data" in refused.document["error"]
    done = tune(*run, "--allow-other-data", "--concurrency", "3")
    assert done.code == 0, done.stderr
    result = done.document["result"]
    assert result["counts"]["correct"] == 1 and result["accuracy"] == 0.2
    assert result["data_pinned"] is False and result["acceptance"]["requests"] == 5
    assert done.document["engine"]["build"] == "vllm 0.0"
    assert "machine unknown" in done.document["engine"]["hardware"] and "machine unknown" in done.stderr
    assert "gsm8k strict-8shot: 5 of 5" in done.stderr
    asked = len(engine.requests_seen)
    assert tune(*run, "--allow-other-data").code == 0 and len(engine.requests_seen) == asked
    other = tune(*run, "--allow-other-data", "--protocol", "vllm-8shot")
    assert other.code == 2 and "another run" in other.document["error"]
    scored = tune("gsm8k", "score", tmp_path / "out" / "items.jsonl", "--protocol", "vllm-8shot")
    assert scored.code == 0 and scored.document["result"]["counts"]["correct"] == 1
    asked = done.document
    assert (scored.document["engine"], scored.document["workload"]) == (asked["engine"], asked["workload"])
    thinking = tune(
        *run[:-4], "--out", tmp_path / "t", "--limit", "2", "--allow-other-data", "--protocol", "thinking"
    )
    assert thinking.code == 1 and "no answer shows thinking" in thinking.document["error"]
    assert thinking.document["status"] == "error" and thinking.document["result"]["accuracy"] is None


LINE = {"id": "a", "completion": "#### 1", "gold": "1", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({**LINE, "finish_reason": None}, "finish_reason"),
        (
            {name: value for name, value in LINE.items() if name != "finish_reason"},
            "finish_reason: Field req",
        ),
        ({**LINE, "completion": None}, "completion: Input should be a valid string"),
        ({**LINE, "gold": "1e999999999"}, "'1e999999999' is no number; write it as 72"),
        ({**LINE, "gold": float("nan")}, "'nan' is no number"),
        ({**LINE, "gold": 1e300}, "'1e+300' is no number"),
        ({**LINE, "gold": True}, "gold"),
        ({**LINE, "tokens": -1}, "tokens"),
        ({**LINE, "id": "first"}, "'first' is there already"),
        ([1], "one JSON object"),
    ],
)
def test_a_completion_that_cant_be_scored(tune: Tune, tmp_path: Path, line: object, says: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({**LINE, "id": "first", "gold": 1}) + "\n" + json.dumps(line) + "\n")
    done = tune("gsm8k", "score", file)
    assert done.code == 2 and "answers.jsonl:2: " in done.document["error"], done.document
    assert says in done.document["error"] and "Error(" not in done.document["error"]


def test_scored_completions_are_a_run_that_compare_takes(tune: Tune, tmp_path: Path) -> None:
    for name, right in (("a", 40), ("b", 39)):
        rows = [LINE | {"id": f"q{i}", "completion": f"#### {int(i < right)}"} for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = tmp_path / f"{name}.jsonl"
        assert tune("gsm8k", "score", file, "--out", tmp_path / name).code == 0
        assert tune("gsm8k", "score", file, "--out", tmp_path / name).code == 0, "the same again"
    unscored = tune("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert unscored.code == 2 and "dspark-tune gsm8k score FILE --out FOLDER" in unscored.document["error"]
    compared = tune("compare", tmp_path / "a", tmp_path / "b")
    assert compared.code == 0 and compared.document["result"]["comparison"]["lost"] == 1
    assert Record.read(tmp_path / "a" / "record.json").result["data_pinned"] is None
    other = tune("gsm8k", "score", tmp_path / "b.jsonl", "--out", tmp_path / "a")
    assert other.code == 2 and "belongs to another run" in other.document["error"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--data", "x", "--url", "u", "--protocol", "mine"], "none of vllm-8shot"),
        (["run", "--data", "nowhere"], "needs test.jsonl"),
        (["run", "--data", "x", "--protocol", "thinking", "--chat-template-kwargs", "{"], "no JSON"),
        (["run", "--data", "x", "--chat-template-kwargs", "{}"], "--protocol thinking"),
        (["score", "nowhere.jsonl"], "can't be read"),
    ],
)
def test_bad_input_says_what_to_do(tune: Tune, arguments: list[str], says: str) -> None:
    done = tune("gsm8k", *arguments)
    assert done.code == 2 and says in done.document["error"] and "Traceback" not in done.stderr
