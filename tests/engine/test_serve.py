"""`dspark-serve` with the real CPU engine: vLLM's server, V2 runner, DSpark speculator, rejection sampler."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from dspark_deploy.plugin.cpu_engine.twins import CATALOGUE
from dspark_deploy.tiny import language
from tests.engine.served import EXTRA_SET, Served, all_gone, served
from tests.support.cli import Tune
from tuning.acceptance import acceptance_between, difference, parse_metrics, past_end_share
from tuning.endpoint import Endpoint

pytestmark = pytest.mark.engine


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return Tune(monkeypatch, capsys)


PROBABILISTIC = (
    "--set",
    "speculative.draft_sample_method=probabilistic",
    "--set",
    "speculative.rejection_sample_method=block",
)


# What the measuring commands below ask of an engine that they didn't boot.
MEASURED = (
    *("--set", "engine.args.max-model-len=1024"),
    *("--set", "engine.args.per-request-spec-decode-metrics=summary"),
)


def test_serves_reports_its_patches_and_leaves_nothing(tmp_path: Path, tune: Tune) -> None:
    problem = language.problems(language.ACCURACY_SEEDS[0], 1)[0]
    with served(tmp_path, *MEASURED, "--set", "engine.args.shutdown-timeout=20") as server:
        processes = server.ready["processes"]
        assert len(processes) == 3, "API server, engine core, worker"
        for process in processes:
            assert sum(process["milliseconds"].get(phase, 0) for phase in ("platform", "general")) < 50
            states = {patch["name"]: patch["state"] for patch in process["patches"]}
            assert states["triton-interpreter-driver"] == "applied"
            assert states["vllm-triton-enabled"] == "applied"
        worker = processes[-1]
        assert worker["milliseconds"]["late"] < 200, "once; 52 on two slow cores, and more without .pyc files"
        twins = [patch for patch in worker["patches"] if patch["name"].startswith("twin:")]
        every = len(CATALOGUE)
        expected = 0 if "engine.cpu_twins=false" in EXTRA_SET else every
        assert [patch["state"] for patch in twins] == ["applied"] * expected
        with server.client() as client:
            before = parse_metrics(client.get("/metrics").text)
            body = {"model": "tiny", "max_tokens": 96, "temperature": 0}
            prompt = language.prompt(problem)
            completion = client.post("/v1/completions", json=body | {"prompt": prompt}).json()
            assert completion["choices"][0]["finish_reason"] == "stop"
            assert language.final_answer(completion["choices"][0]["text"]) is not None
            messages = [{"role": "user", "content": problem.question}]
            chat = client.post("/v1/chat/completions", json=body | {"messages": messages}).json()
            assert (
                chat["choices"][0]["message"]["content"].strip() == completion["choices"][0]["text"].strip()
            )
            found = acceptance_between(before, parse_metrics(client.get("/metrics").text))
        assert found.drafts > 0 and len(found.per_position) == 5 and found.length > 2
        measures_an_endpoint(server.ready["url"], tmp_path, tune)
        run = tmp_path / server.ready["run_directory"]
        command = json.loads((run / "command.json").read_text())
        assert '"method": "dspark"' in " ".join(command["command"])
        family = server.family()
        assert len(family) >= 4, "guardian, API server, engine core, worker"
        assert answer_over_a_stop(server, signal.SIGINT)[-1] == "data: [DONE]", "it was in flight, and ended"
        assert server.process.wait(60) == 130
        assert all_gone(family, 5)
    final = server.documents()[-1]
    assert (final["status"], final["exit_code"]) == ("interrupted", 130)
    assert "Traceback" not in server.stderr.read_text()


def answer_over_a_stop(server: Served, number: int) -> list[str]:
    """The lines of a streamed answer in whose midst the command was sent a signal."""
    lines: list[str] = []
    body = {"model": "tiny", "prompt": "Q:", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        for line in filter(None, reply.iter_lines()):
            lines.append(line)
            if len(lines) == 2:
                server.process.send_signal(number)
    return lines


def measures_an_endpoint(url: str, folder: Path, tune: Tune) -> None:
    """The commands that take any endpoint, on this one: GSM8K's form in the language that it speaks."""
    data = folder / "data"
    data.mkdir()
    drawn = language.problems(language.ACCURACY_SEEDS[0], 20)
    rows = [
        json.dumps({"question": p.question, "answer": f"{p.solution.partition('####')[0]}#### {p.answer}"})
        + "\n"
        for p in drawn
    ]
    (data / "train-head.jsonl").write_text("".join(rows[:8]))
    (data / "test.jsonl").write_text("".join(rows[8:]))
    run = ["gsm8k", "run", "--data", data, "--allow-other-data", "--url", url, "--limit", 6]
    with Endpoint.find(url, None) as endpoint:
        before = endpoint.scrape()
        done = tune(*run, "--protocol", "vllm-8shot", "--concurrency", 6, "--out", folder / "gsm8k")
        counted = acceptance_between(before, endpoint.scrape())
        after = endpoint.scrape()
    # Prompts of this length are new to the tiny pair, so the run may be void for loops; then it says so.
    assert done.code in (0, 1), done.stderr
    result = done.document["result"]
    assert result["counts"]["questions"] == 6 and bool(result["void"]) == (done.code == 1)
    by_request = result["acceptance"]
    assert by_request["requests"] == 6
    assert by_request["pooled"] == pytest.approx(counted.length), "each request's own steps add up to all"
    assert by_request["past_end_share"] == pytest.approx(past_end_share(difference(before, after)))
    for name in ("before", "after"):
        page = httpx.get(f"{url}/metrics", timeout=60).text
        (folder / f"{name}.prom").write_text(page)
        drifted = tune("divergence", "--url", url, "--prompts", 8, "--out", folder / f"{name}.json")
        assert drifted.code == 0 and drifted.document["result"]["within"]["prompts"] == 8
    compared = tune("divergence", folder / "before.json", folder / "after.json").document["result"]
    assert compared["across"]["median_logprob_delta"] < 0.05
    told = tune("acceptance", "--before", folder / "before.prom", "--after", folder / "after.prom")
    assert told.code == 0 and told.document["result"]["acceptance_length"] > 2


def test_probabilistic_drafts_block_rejection_and_sigkill_of_the_command(tmp_path: Path) -> None:
    prompts = [language.prompt(p) for p in language.problems(language.LOAD_SEEDS[9], 8)]
    with served(tmp_path, *PROBABILISTIC) as server:
        with server.client() as client:
            body = {"model": "tiny", "prompt": prompts, "max_tokens": 96, "temperature": 0.8, "seed": 1}
            choices = client.post("/v1/completions", json=body).json()["choices"]
        answered = [language.final_answer(choice["text"]) for choice in choices]
        assert sum(answer is not None for answer in answered) >= 6, choices
        family = server.family()
        server.process.kill()
        server.process.wait()
        assert all_gone(family), "the guardian ends the engine of a command that was killed"


def test_what_vllm_changed_is_reported(tmp_path: Path) -> None:
    """vLLM's CPU platform schedules without overlap and captures nothing, whatever was asked."""
    changed = (
        "--set",
        "engine.args.async-scheduling=true",
        "--set",
        "engine.args.cudagraph-capture-sizes=[6]",
    )
    kept = (
        "--set",
        "engine.args.max-num-batched-tokens=512",
        "--set",
        "engine.args.enable-prefix-caching=false",
    )
    with served(tmp_path, *changed, *kept, "--set", "mhc.gate='off'") as server:
        found = {each["setting"]: each for each in server.ready["differences"]}
        assert found.keys() == {"async-scheduling", "cudagraph-capture-sizes"}
        assert (found["async-scheduling"]["asked"], found["async-scheduling"]["chosen"]) == (True, False)
        assert all(each["severity"] == "warning" and each["why"] for each in found.values())
        worker = server.ready["processes"][-1]["resolved"]
        assert worker["flags"]["max-num-batched-tokens"] == 512
        assert worker["flags"]["enable-prefix-caching"] is False
        assert worker["speculative"]["method"] == "dspark"
        assert "asked" in server.stderr.read_text(), "the table is there for people"


def run_serve(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dspark_deploy.serve", "--profile", "cpu-tiny.yaml", "--json", "--quiet"]
    return subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_an_engine_that_dies_at_start(tmp_path: Path) -> None:
    done = run_serve(tmp_path, "--set", "engine.port=0", "--set", "engine.args.max-num-batched-tokens=8")
    assert done.returncode == 5
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["exit_code"] == 5
    assert "max_num_batched_tokens" in document["error"], "the engine's own reason is in the message"
    assert "Traceback" not in done.stderr


def test_an_engine_that_is_not_ready_in_time(tmp_path: Path) -> None:
    done = run_serve(tmp_path, "--set", "engine.port=0", "--set", "engine.ready_timeout_s=2")
    assert done.returncode == 5
    assert "not ready within 2 s (engine.ready_timeout_s)" in done.stderr


def test_a_missing_checkpoint_and_a_taken_port_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_serve(tmp_path, "--set", f"engine.port={port}", "--model", "./nowhere")
    assert done.returncode == 3
    assert "PORT_IN_USE" in done.stderr and "CHECKPOINT_MISSING" in done.stderr
