"""One OpenAI endpoint that vLLM serves: requests, metrics, prefix cache. Ours or anybody's.

    endpoint = Endpoint("http://localhost:8000", model="tiny")
    answer = endpoint.complete("Q: ...", Sampling(max_tokens=96))

The key, where one is needed, comes from OPENAI_API_KEY and is shown nowhere. Answers are not streamed: times
are `vllm bench serve`'s affair, and a whole answer carries the engine's own acceptance of that request where
it serves with `--per-request-spec-decode-metrics`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from dspark_deploy.errors import InputError, MeasurementError
from dspark_deploy.redaction import mask_credentials
from tuning.acceptance import MetricsError, Scrape, parse_metrics

REQUEST_TIMEOUT_S = 600
SCRAPE_TIMEOUT_S = 60  # a page of counters is made at once, even by a busy server
SHOWN = 200
KEY_VARIABLE = "OPENAI_API_KEY"


class RequestFailed(MeasurementError):
    """A request got no usable answer. An error is no wrong answer, so whoever counts must stop here."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, always said, since servers' defaults differ. `extra` goes into the body."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, chat: bool) -> dict[str, Any]:
        """The fields of the request."""
        found: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        optional = {"top_p": self.top_p, "seed": self.seed, "stop": list(self.stop) or None}
        found |= {name: value for name, value in optional.items() if value is not None}
        if self.logprobs:
            found["logprobs"] = True if chat else 1
        if self.ignore_eos:
            found["ignore_eos"] = True
        return found | dict(self.extra)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `histogram[j]`: steps that accepted j drafts, where the engine says so."""

    text: str
    reasoning: str
    finish_reason: str
    completion_tokens: int | None
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()


class Endpoint:
    """A client of one server. Usable from several threads; closed by leaving the `with` block.

    `url` is for people and records: it has no user and no password.
    """

    def __init__(self, url: str, model: str, transport: httpx.BaseTransport | None = None) -> None:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        address = url.rstrip("/").removesuffix("/v1")
        self.url = mask_credentials(address)
        self.model = model
        try:
            self._client = httpx.Client(
                base_url=address,
                timeout=REQUEST_TIMEOUT_S,
                transport=transport,
                headers=headers,
                limits=httpx.Limits(max_connections=None),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise InputError(
                f"{mask_credentials(url)}: is no URL: {mask_credentials(str(error))}; write it as http://localhost:8000"
            ) from error

    def complete(self, prompt: str, sampling: Sampling) -> Answer:
        """One completion of a raw prompt. Raises RequestFailed."""
        body = {"model": self.model, "prompt": prompt} | sampling.body(chat=False)
        return _answer(self._post("/v1/completions", body), chat=False)

    def chat(self, messages: list[dict[str, str]], sampling: Sampling) -> Answer:
        """One answer in a chat, rendered by the server's own template. Raises RequestFailed."""
        body = {"model": self.model, "messages": messages} | sampling.body(chat=True)
        return _answer(self._post("/v1/chat/completions", body), chat=True)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = self._client.post(path, json=body)
            if response.is_error:
                raise RequestFailed(
                    f"{path} answered {response.status_code}: {response.text[:SHOWN].strip()}"
                )
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RequestFailed(
                f"{path} failed: {type(error).__name__}: {mask_credentials(str(error))}"
            ) from error

    def scrape(self) -> Scrape:
        """The engine's counters now. Raises MetricsError."""
        try:
            response = self._client.get("/metrics", timeout=SCRAPE_TIMEOUT_S)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise MetricsError(
                f"{self.url}/metrics does not answer: {mask_credentials(str(error))}"
            ) from error
        return parse_metrics(response.text)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False where the server has no such route (VLLM_SERVER_DEV_MODE has)."""
        try:
            return self._client.post("/reset_prefix_cache").status_code == httpx.codes.OK
        except httpx.HTTPError as error:
            raise MetricsError(f"{self.url} does not answer: {mask_credentials(str(error))}") from error

    def describe(self) -> dict[str, str]:
        """Version and model as the server tells them; empty strings where it does not."""
        return {"version": self._json_field("/version", "version"), "model": self.model}

    def _json_field(self, path: str, name: str) -> str:
        try:
            document = self._client.get(path).json()
        except (httpx.HTTPError, ValueError):
            return ""
        return str(document.get(name, "")) if isinstance(document, dict) else ""

    @classmethod
    def find(cls, url: str, model: str | None, transport: httpx.BaseTransport | None = None) -> Endpoint:
        """The endpoint, with the only model it serves where none is named. Raises InputError."""
        endpoint = cls(url, model or "", transport)
        try:
            response = endpoint._client.get("/v1/models")
            served = [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            endpoint.close()
            raise InputError(
                f"{endpoint.url}: does not list its models at /v1/models ({type(error).__name__}: "
                f"{mask_credentials(str(error))}); is it an OpenAI endpoint, ready, and does it want a key "
                f"in {KEY_VARIABLE}?"
            ) from error
        if model is None and len(served) == 1:
            endpoint.model = served[0]
        elif (model or "") not in served:
            endpoint.close()
            raise InputError(
                f"{endpoint.url}: serves {', '.join(served) or 'nothing'}; choose one with --model"
            )
        return endpoint

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _answer(document: Any, chat: bool) -> Answer:
    """The first choice. Raises RequestFailed for anything that has none."""
    try:
        choice = document["choices"][0]
        message = choice["message"] if chat else {}
        text = message.get("content") or "" if chat else choice["text"]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        usage = (document.get("usage") or {}).get("completion_tokens")
        tokens, logprobs = _logprobs(choice.get("logprobs"), chat)
        told = ((document.get("metrics") or {}).get("speculative_decoding") or {}).get("acceptance_histogram")
        if not isinstance(text, str):
            raise TypeError("no text")
        return Answer(
            text,
            str(reasoning),
            str(choice.get("finish_reason") or ""),
            usage,
            tokens,
            logprobs,
            tuple(int(count) for count in told or ()),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise RequestFailed(f"the answer has no text ({error!r}): {str(document)[:SHOWN]}") from error


def _logprobs(found: Any, chat: bool) -> tuple[tuple[str, ...], tuple[float, ...]]:
    if not found:
        return (), ()
    if chat:
        rows = found["content"] or []
        return tuple(row["token"] for row in rows), tuple(float(row["logprob"]) for row in rows)
    return tuple(found["tokens"]), tuple(float(value) for value in found["token_logprobs"])
