"""A stand-in for the `vllm` command that can go wrong on purpose, and starts in a tenth of a second.

    with_bad_engine(monkeypatch)                     in this process: commands start this file for vLLM
    python -m tests.support.bad_engine tune sweep …  `dspark-tune` in a process of its own, with it
    python -m tests.support.bad_engine serve …       `dspark-serve` likewise

BAD_ENGINE in the environment says how, as a JSON object:

    fault     exit at load | killed at load | hang at start | hang at shutdown | silent metrics |
              garbage metrics | error body | none
    dies_at   the number of the completion at which it kills itself, or after an "out of memory" traceback
    memory    true: it dies of memory

`serve` answers what the product asks of an OpenAI server, `bench serve` sends its prompts one after another
and ends with code 1 where one fails. It generates nothing: every answer is `ANSWER`. Not covered: anything
about speed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWER = "so #### 7"
MEMORY = """\
Traceback (most recent call last):
  File "/x/vllm/v1/sample/sampler.py", line 7, in forward
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""
METRICS = """\
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0"} 12
"""


class Handler(BaseHTTPRequestHandler):
    """The few routes that the product asks for."""

    fault, dies_at, memory, seen = "none", 0, False, 0

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.fault == "silent metrics":
            time.sleep(600)
        pages = {"/health": "", "/metrics": METRICS, "/version": '{"version": "0"}'}
        pages["/v1/models"] = '{"data": [{"id": "tiny"}]}'
        page = "\x00<html>{{{ 7" if self.path == "/metrics" and self.fault == "garbage metrics" else None
        self._answer(page or pages.get(self.path, ""))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/reset_prefix_cache":
            return self._answer("")
        Handler.seen += 1
        if Handler.seen == self.dies_at:
            if self.memory:
                sys.stderr.write(MEMORY)
                sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "error body":
            return self._answer('{"error": {"message": "the engine is tired", "code": 500}}')
        choice = {"text": ANSWER, "message": {"content": ANSWER}, "finish_reason": "stop", "index": 0}
        return self._answer(json.dumps({"choices": [choice], "usage": {"completion_tokens": 4}}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def serve(argv: list[str]) -> None:
    """`vllm serve`, as BAD_ENGINE says."""
    _say_arguments(argv)
    wanted = json.loads(os.environ.get("BAD_ENGINE", "{}"))
    fault = wanted.get("fault", "none")
    Handler.fault, Handler.dies_at, Handler.memory = fault, wanted.get("dies_at", 0), wanted.get("memory")
    # As vLLM has one: a process of its own, that a killed server would leave behind.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if fault == "exit at load":
        sys.exit("ValueError: weights are not what config.json says")
    if fault == "killed at load":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang at start":
        time.sleep(600)
    if fault == "hang at shutdown":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address = (argv[argv.index("--host") + 1], int(argv[argv.index("--port") + 1]))
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(address, Handler).serve_forever()


def _say_arguments(argv: list[str]) -> None:
    """vLLM writes its flags to its log, whatever they hold."""
    print("non-default args:", argv, flush=True)


def bench(argv: list[str]) -> None:
    """`vllm bench serve`, one request after another."""
    _say_arguments(argv)

    def value(flag: str) -> str:
        return argv[argv.index(flag) + 1]

    started = time.monotonic()
    number, latencies = int(value("--num-prompts")), []
    for _ in range(number):
        begun = time.monotonic()
        request = urllib.request.Request(value("--base-url") + "/v1/completions", data=b"{}")
        with urllib.request.urlopen(request, timeout=60) as reply:  # a failure ends with its traceback
            choices = json.load(reply).get("choices")
        latencies.append(time.monotonic() - begun if choices else 0.0)
    duration = time.monotonic() - started
    document = {
        "errors": ["" if latency else "no choices" for latency in latencies],
        "failed": latencies.count(0.0),
        "completed": number,
        "duration": duration,
        "output_lens": [4] * number,
        "total_output_tokens": 4 * number,
        "output_throughput": 4 * number / duration,
        "latencies": latencies,
        "ttfts": [latency / 2 for latency in latencies],
        "itls": [[latency / 6] * 3 for latency in latencies],
    }
    (Path(value("--result-dir")) / value("--result-filename")).write_text(json.dumps(document))


def with_bad_engine(monkeypatch: Any) -> None:
    """Let commands start this file where they would start vLLM."""
    from dspark_deploy.launch import command
    from tuning import load

    program = [sys.executable, str(Path(__file__).resolve())]
    monkeypatch.setattr(command, "vllm_program", lambda distribution: program)
    monkeypatch.setattr(load, "vllm_program", lambda distribution: program)


def _product(name: str, argv: list[str]) -> None:
    from pytest import MonkeyPatch

    with_bad_engine(MonkeyPatch())
    if name == "serve":
        from dspark_deploy.serve import main
    else:
        from tuning.sweep import main
    sys.argv = [f"dspark-{name}", *argv]
    main()


if __name__ == "__main__":
    if __package__:
        _product(sys.argv[1], sys.argv[2:])
    elif sys.argv[1] == "serve":
        serve(sys.argv[2:])
    else:
        bench(sys.argv[2:])
