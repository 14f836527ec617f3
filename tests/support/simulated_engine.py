"""An engine of known step time and acceptance, without a clock: what estimators are held against.

    engine = SimulatedEngine(chances=(0.8, 0.6), step_ms=20)
    engine.bench(requests=40, concurrency=4)      what `vllm bench serve --save-detailed` would write
    engine.page()                                 its /metrics so far, two engines of one deployment
    engine.transport()                            the same engine behind httpx, for clients of ours
    served(engine)                                the same on a socket, for `vllm bench serve` and commands

Each step accepts draft j with chance `chances[j]` if it accepted those before, and yields one token more. As
in vLLM, drafts past an answer's end are counted as accepted, and reach nobody. Times have gamma-distributed
noise of the given means, so that an interval has something to cover. A request's luck depends on the seed, on
its prompt and on how often that prompt came, not on which thread came first: a test sees the same each time.
"""

from __future__ import annotations

import heapq
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np


@dataclass
class Simulated:
    """One request as it went."""

    ttft_s: float
    gaps_s: list[float]
    tokens: int
    histogram: list[int]


@dataclass
class SimulatedEngine:
    """See the module. `noise` is the coefficient of variation of every time; `text` is what it answers."""

    chances: tuple[float, ...] = (0.8, 0.6, 0.5)
    step_ms: float = 20.0
    prefill_ms: float = 100.0
    noise: float = 0.3
    seed: int = 0
    tells_histograms: bool = True
    text: str = "so #### 7"
    counters: list[dict[str, Any]] = field(default_factory=list)
    requests_seen: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock, self._seen = threading.Lock(), Counter[str]()
        k = len(self.chances)
        self.counters = [{"drafts": 0, "positions": [0] * k, "generated": 0, "finished": 0} for _ in range(2)]

    @property
    def length(self) -> float:
        """The true acceptance length: 1 + sum over j of the chance to accept j drafts or more."""
        return float(1 + np.cumprod(self.chances).sum())

    def expected_steps(self, tokens: int) -> float:
        """Expected steps behind the prefill for an answer of `tokens` tokens, by recursion on the rest."""
        reach = [1.0, *np.cumprod(self.chances)]
        exactly = [a - b for a, b in zip(reach, [*reach[1:], 0.0], strict=True)]
        left = [0.0] * tokens
        for n in range(1, tokens):
            left[n] = 1 + sum(p * left[max(n - 1 - j, 0)] for j, p in enumerate(exactly))
        return left[tokens - 1]

    def request(self, tokens: int, prompt: str = "") -> Simulated:
        """One answer of `tokens` tokens."""
        with self._lock:
            self._seen[prompt] += 1
            random = np.random.default_rng([self.seed, zlib.crc32(prompt.encode()), self._seen[prompt]])
            return self._request(tokens, random)

    def _request(self, tokens: int, random: np.random.Generator) -> Simulated:
        k, gaps, histogram, sent = len(self.chances), [], [0] * (len(self.chances) + 1), 1
        counter = self.counters[int(random.integers(2))]
        while sent < tokens:
            accepted = 0
            while accepted < k and random.random() < self.chances[accepted]:
                counter["positions"][accepted] += 1
                accepted += 1
            histogram[accepted] += 1
            counter["drafts"] += 1
            gaps.append(self._time(self.step_ms, random))
            sent += accepted + 1
        counter["generated"] += tokens
        counter["finished"] += 1
        return Simulated(self._time(self.prefill_ms, random), gaps, tokens, histogram)

    def _time(self, mean_ms: float, random: np.random.Generator) -> float:
        if not self.noise:
            return mean_ms / 1000
        shape = 1 / self.noise**2
        return float(random.gamma(shape, mean_ms / 1000 / shape))

    def bench(
        self, requests: int, concurrency: int, tokens: int = 60, late_ms: float = 0.0, **limits: float
    ) -> dict[str, Any]:
        """A closed loop, run to its end; a step takes as long whatever the batch."""
        found = [self.request(tokens) for _ in range(requests)]
        latencies = [one.ttft_s + sum(one.gaps_s) for one in found]
        free, starts = [0.0] * concurrency, []
        for number, latency in enumerate(latencies):
            start = heapq.heappop(free) + (late_ms / 1000 if number >= concurrency else 0.0)
            starts.append(start)
            heapq.heappush(free, start + latency)
        duration = max(free)
        tpots = [(latency - one.ttft_s) / (tokens - 1) for latency, one in zip(latencies, found, strict=True)]
        good = sum(
            one.ttft_s * 1000 <= limits.get("ttft", np.inf) and tpot * 1000 <= limits.get("tpot", np.inf)
            for one, tpot in zip(found, tpots, strict=True)
        )
        return {
            "errors": [""] * requests,
            "failed": 0,
            "completed": requests,
            "duration": duration,
            "total_output_tokens": tokens * requests,
            "output_throughput": tokens * requests / duration,
            "request_goodput": good / duration if limits else None,
            "output_lens": [tokens] * requests,
            "ttfts": [one.ttft_s for one in found],
            "itls": [one.gaps_s for one in found],
            "latencies": latencies,
            "start_times": starts,
        }

    def page(self) -> str:
        """The metrics page of both engines."""
        lines = []
        for number, counter in enumerate(self.counters):
            labels = f'engine="{number}",model_name="a model"'
            drafts, positions = counter["drafts"], counter["positions"]
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}",
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {drafts * len(positions)}",
                f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {sum(positions)}",
                f"vllm:generation_tokens_total{{{labels}}} {counter['generated']}",
                f'vllm:request_success_total{{{labels},finished_reason="length"}} {counter["finished"]}',
            ]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{j}"}} {count}'
                for j, count in enumerate(positions)
            ]
        return "\n".join(lines) + "\n"

    def transport(self) -> httpx.MockTransport:
        """This engine as an OpenAI endpoint."""
        return httpx.MockTransport(self.handle)

    def handle(self, request: httpx.Request) -> httpx.Response:
        """One HTTP request."""
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "simulated"}]})
        if path == "/version":
            return httpx.Response(200, json={"version": "0.0"})
        if path == "/metrics":
            return httpx.Response(200, text=self.page())
        if path == "/reset_prefix_cache":
            return httpx.Response(200)
        body = json.loads(request.content)
        self.requests_seen.append(body)
        return httpx.Response(200, json=self.answer(body, chat=path.endswith("chat/completions")))

    def text_for(self, body: dict[str, Any]) -> str:
        """What it answers; the same to everybody."""
        return self.text

    def finish_for(self, body: dict[str, Any]) -> str:
        """How its answers end."""
        return "stop"

    def answer(self, body: dict[str, Any], chat: bool) -> dict[str, Any]:
        """The document of one answer."""
        one, text = self.request(min(int(body["max_tokens"]), 60), _prompt(body)), self.text_for(body)
        choice: dict[str, Any] = {"finish_reason": self.finish_for(body)}
        choice |= {"message": {"content": text}} if chat else {"text": text}
        if body.get("logprobs"):
            words = text.split()
            choice["logprobs"] = {"tokens": words, "token_logprobs": [-0.1] * len(words)}
        document: dict[str, Any] = {"choices": [choice], "usage": {"completion_tokens": one.tokens}}
        if self.tells_histograms:
            document["metrics"] = {"speculative_decoding": {"acceptance_histogram": one.histogram}}
        return document


def _prompt(body: dict[str, Any]) -> str:
    return json.dumps(body.get("messages") or body.get("prompt"))


@contextmanager
def served(engine: SimulatedEngine) -> Iterator[str]:
    """The engine on a socket, in this process, for as long as the block lasts; gives its URL.

    Streamed answers take the time that they say: prefill, then a chunk of a step's tokens after each step.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body in one packet: two would wait 40 ms for an acknowledgement

        def do_GET(self) -> None:
            self._reply(engine.handle(httpx.Request("GET", f"http://e{self.path}")))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = httpx.Request("POST", f"http://e{self.path}", content=content)
            body = json.loads(content) if content else {}
            if body.get("stream"):
                self._stream(body)
            else:
                self._reply(engine.handle(request))

        def _reply(self, response: httpx.Response) -> None:
            self.send_response(response.status_code)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def _stream(self, body: dict[str, Any]) -> None:
            engine.requests_seen.append(body)
            one = engine.request(int(body["max_tokens"]), _prompt(body))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for wait in (one.ttft_s, *one.gaps_s):
                time.sleep(wait)
                self._event({"choices": [{"text": "some words"}]})
            self._event({"choices": [], "usage": {"completion_tokens": one.tokens, "prompt_tokens": 5}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, document: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Tests have no use for an access log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
