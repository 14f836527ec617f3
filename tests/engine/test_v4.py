"""The tiny DeepSeek-V4 with its DSpark stages over HTTP: three engines, asked the same problems.

    drafting     greedy drafts, k = 5: log probabilities, window, acceptance length, patches
    plain        no speculation: the same text
    sampling     probabilistic drafts, torch's mHC: temperature 1; greedy text and log probabilities as before

Log probabilities and acceptance length are held against the training twin, whose logits are transformers'
(see `tests/unit/test_tiny_v4_model.py`). What is left between them is bfloat16 and the fp8 cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dspark_deploy.tiny import evaluate, language
from dspark_deploy.tiny.checkpoint import verify
from dspark_deploy.tiny.v4.export import read_checkpoint
from tests.engine.served import EXTRA_SET, Served, served
from tuning.acceptance import Acceptance, acceptance_between, parse_metrics

pytestmark = pytest.mark.engine

PATCHES = ("cpu-v4-draft", "cpu-v4-experts", "cpu-v4-tile-scheduler", "cpu-v4-windows")
WINDOW, K, FEW = 128, 5, 24
ASKED = language.problems(language.ACCURACY_SEEDS[0], 100)
PROMPTS = [language.prompt(each) for each in ASKED]
LONG = "".join(f"{language.prompt(each)} {each.solution}\n" for each in ASKED[4:6])
GREEDY: dict[str, Any] = {"model": "tiny-v4", "max_tokens": 96, "temperature": 0, "logprobs": 1}


class Twin(NamedTuple):
    """The checkpoint as it was trained."""

    target: Any
    draft: Any
    tokenizer: Any

    def differences(self, prompt: str, choice: dict[str, Any]) -> list[float]:
        """How far the log probability of each answered token is from the twin's, in nats."""
        before, after = self.tokenizer.encode(prompt).ids, self.tokenizer.encode(choice["text"]).ids
        with torch.no_grad():
            scores = self.target(torch.tensor([before + after]))[0].log_softmax(-1)
        found = choice["logprobs"]["token_logprobs"]
        places = range(len(before) - 1, len(before) + len(after) - 1)
        return [
            abs(float(scores[place, token]) - logprob)
            for place, token, logprob in zip(places, after, found, strict=False)
        ]


class Drafted(NamedTuple):
    """What the engine with greedy drafts said."""

    choices: list[dict[str, Any]]
    beyond: list[dict[str, Any]]
    acceptance: Acceptance
    worker: dict[str, Any]


@pytest.fixture(scope="module")
def twin() -> Twin:
    return Twin(*read_checkpoint(verify("tiny-v4")))


def complete(server: Served, prompts: list[str], **changes: Any) -> tuple[list[dict[str, Any]], Acceptance]:
    """The choices in the prompts' order, and the acceptance meanwhile."""
    with server.client() as client:
        before = parse_metrics(client.get("/metrics").text)
        reply = client.post("/v1/completions", json=GREEDY | {"prompt": prompts} | changes)
        found = acceptance_between(before, parse_metrics(client.get("/metrics").text))
    return reply.raise_for_status().json()["choices"], found


def right(choices: list[dict[str, Any]]) -> int:
    """How many of the first problems were answered rightly."""
    return sum(language.final_answer(c["text"]) == p.answer for c, p in zip(choices, ASKED, strict=False))


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    with served(tmp_path_factory.mktemp("drafting"), "--profile", "cpu-v4.yaml") as server:
        choices, acceptance = complete(server, PROMPTS)
        beyond, _ = complete(server, [LONG + prompt for prompt in PROMPTS[:2]], max_tokens=40)
        return Drafted(choices, beyond, acceptance, server.ready["processes"][-1])


def test_deepseek_v4_drafts_for_itself(drafted: Drafted, twin: Twin) -> None:
    states = {patch["name"]: patch["state"] for patch in drafted.worker["patches"]}
    assert [states[name] for name in PATCHES] == ["applied"] * len(PATCHES)
    assert states["cpu-v4-kernels"] in ("applied", "upstream")
    assert drafted.worker["numerics"]["state"] == "passed"
    assert right(drafted.choices) >= 93


def test_log_probabilities_are_the_twins(drafted: Drafted, twin: Twin) -> None:
    near = [d for p, c in zip(PROMPTS[:8], drafted.choices[:8], strict=True) for d in twin.differences(p, c)]
    long = [LONG + prompt for prompt in PROMPTS[:2]]
    assert min(len(twin.tokenizer.encode(prompt).ids) for prompt in long) > WINDOW
    far = [d for p, c in zip(long, drafted.beyond, strict=True) for d in twin.differences(p, c)]
    assert len(near) > 200 and sum(near) / len(near) < 0.03, sum(near) / len(near)
    assert len(far) > 50 and sum(far) / len(far) < 0.15, sum(far) / len(far)


@pytest.mark.skipif(bool(EXTRA_SET), reason="another engine than the profile's")
def test_the_draft_is_the_twins(drafted: Drafted, twin: Twin) -> None:
    """The twin counts the problems that it has exact, and no draft past an end: the engine counts all."""
    expected = evaluate.acceptance_length(*twin, ASKED, K)
    assert expected is not None
    assert drafted.acceptance.length == pytest.approx(expected, rel=0.03)


def test_greedy_text_is_that_of_no_speculation(tmp_path: Path, drafted: Drafted) -> None:
    with served(tmp_path, "--profile", "cpu-v4.yaml", "--set", "speculative=null") as server:
        plain, counted = complete(server, PROMPTS)
    assert counted.drafts == 0
    same = sum(a["text"] == b["text"] for a, b in zip(plain, drafted.choices, strict=True))
    assert same >= 99, "batches of other shapes round otherwise; one text may part"


def test_probabilistic_drafts_temperature_and_torchs_mhc(tmp_path: Path, drafted: Drafted) -> None:
    sets = ("--set", "speculative.draft_sample_method=probabilistic", "--set", "mhc.provider=torch")
    with served(tmp_path, "--profile", "cpu-v4.yaml", *sets) as server:
        worker = server.ready["processes"][-1]
        warm, acceptance = complete(server, PROMPTS[:FEW], temperature=1, seed=1)
        cold, _ = complete(server, PROMPTS[:FEW])
    provider = next(patch for patch in worker["patches"] if patch["name"] == "mhc-provider")
    assert provider["state"] == "applied" and provider["detail"].startswith("torch")
    assert acceptance.length > 3.5 or EXTRA_SET
    texts = [[choice["text"] for choice in choices] for choices in (warm, cold)]
    assert right(warm) >= 0.8 * FEW and texts[0] != texts[1], (
        "sampled, by a model that is sure of most tokens"
    )
    auto = drafted.choices[:FEW]
    assert sum(a["text"] == b["text"] for a, b in zip(cold, auto, strict=True)) >= FEW - 1
    apart = [
        abs(a - b)
        for ours, other in zip(cold, auto, strict=True)
        if ours["text"] == other["text"]
        for a, b in zip(ours["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True)
    ]
    # Where vLLM has no C++ kernels, auto is torch too, and only batching is between them.
    assert len(apart) > 500 and sum(apart) / len(apart) < 0.01, sum(apart) / len(apart)
