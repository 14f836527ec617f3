"""Load results, greedy accuracy and their failure: an error never becomes a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from dspark_deploy.errors import InputError
from tests.unit.measurements import answers, measurement
from tuning.accuracy import AccuracyRun, AccuracyVoidError, greedy, run_accuracy
from tuning.endpoint import Endpoint
from tuning.load import LoadFailedError, read_result, request_tpot_ms
from tuning.measurement import Measurement
from tuning.workload import Question, TinyArithmetic, find_workload, sweep_workload


def bench(**changes: object) -> dict[str, object]:
    """What `vllm bench serve --save-detailed` writes, as far as it is read."""
    return {
        "errors": ["", "", ""],
        "failed": 0,
        "latencies": [0.62, 1.0, 0.4],
        "ttfts": [0.5, 0.2, 0.4],
        "output_lens": [13, 41, 1],
        "completed": 3,
        "duration": 2.0,
        "total_output_tokens": 55,
        "output_throughput": 27.5,
    } | changes


def test_tpot_counts_tokens_and_not_chunks() -> None:
    # 13 tokens in five chunks, 30 ms apart, after 500 ms: 10 ms a token.
    assert request_tpot_ms(0.62, 0.5, 13) == pytest.approx(10.0)


def test_a_one_token_answer_has_no_tpot_and_is_left_out() -> None:
    result = read_result(bench(), concurrency=4)
    assert result.tpot_ms == [pytest.approx(10.0), pytest.approx(20.0), None]
    assert result.mean_tpot_ms == pytest.approx(15.0)
    assert result.percentile("ttft_ms", 50) == pytest.approx(400.0)


def test_gaps_between_chunks_stand_in_for_the_latency_that_older_releases_do_not_write() -> None:
    older = bench(itls=[[0.03, 0.03, 0.06], [0.8], []])
    del older["latencies"]
    assert read_result(older, 1).tpot_ms == pytest.approx(read_result(bench(), 1).tpot_ms)


@pytest.mark.parametrize("changes", [{"errors": ["", "boom", ""]}, {"failed": 1}])
def test_failed_requests_void_a_load(changes: dict[str, object]) -> None:
    with pytest.raises(LoadFailedError, match="1 requests failed"):
        read_result(bench(**changes), 1)


def test_a_load_without_any_tpot_is_void() -> None:
    with pytest.raises(LoadFailedError, match="no answer has two tokens"):
        read_result(bench(output_lens=[1, 1, 0]), 1)


def test_a_measurement_survives_json() -> None:
    made = measurement({1: [3.0, 4.0], 8: [5.0, 6.0]}, k=3)
    again = Measurement.from_json(json.loads(json.dumps(made.as_json())))
    assert again == made
    assert again.acceptance.drafts == 200, "pooled over both loads"


QUESTIONS = [Question(f"q{i}", f"prompt {i}", str(i)) for i in range(6)]


def ask(handler: Callable[[httpx.Request], httpx.Response]) -> AccuracyRun:
    workload = find_workload("tiny-arithmetic")
    with Endpoint("http://engine", "m", httpx.MockTransport(handler)) as endpoint:
        return run_accuracy(QUESTIONS, greedy(endpoint, 9, workload.answer), concurrency=3)


def completion(text: str, finish: str = "stop") -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"text": text, "finish_reason": finish}]})


def test_greedy_accuracy_and_its_columns(tmp_path: Path) -> None:
    def engine(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["temperature"] == 0 and body["model"] == "m" and body["max_tokens"] == 9
        number = int(body["prompt"].split()[1])
        if number == 0:
            return completion("cut #### 0", "length")
        return completion(" no number" if number == 1 else f" so\n#### {number if number < 5 else 7}")

    run = ask(engine)
    assert [item.id for item in run.items] == [question.id for question in QUESTIONS], "order is kept"
    assert run.correct == [False, False, True, True, True, False]
    assert run.counts() == {
        "questions": 6,
        "correct": 3,
        "truncated": 1,
        "unparsed": 1,
        "degenerate": 0,
        "error": 0,
    }
    run.write(tmp_path / "items.jsonl")
    assert AccuracyRun.read(tmp_path / "items.jsonl") == run
    assert run.identical_to(run) == 6


@pytest.mark.parametrize(
    "bad",
    [
        httpx.Response(500, text="boom"),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"error": "x"}),
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, json={"choices": [{"text": None}]}),
        httpx.Response(200, json=[1]),
    ],
)
def test_one_bad_answer_voids_the_run(bad: httpx.Response) -> None:
    def engine(request: httpx.Request) -> httpx.Response:
        return bad if json.loads(request.content)["prompt"] == "prompt 4" else completion("#### 1")

    with pytest.raises(AccuracyVoidError):
        ask(engine)


def test_workload_prompts_are_disjoint() -> None:
    workload = TinyArithmetic()
    groups = [
        workload.warm_up_prompts(50),
        workload.load_prompts(0, 50),
        workload.load_prompts(1, 50),
        [question.prompt for question in workload.questions(50)],
    ]
    everything = [prompt for group in groups for prompt in group]
    assert len(set(everything)) == len(everything) == 200


def test_unknown_workload() -> None:
    with pytest.raises(InputError, match="tiny-arithmetic"):
        sweep_workload("random")


def test_made_up_answers_are_what_they_say() -> None:
    assert answers(90).accuracy == 0.9
