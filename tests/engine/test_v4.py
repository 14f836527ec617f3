"""The tiny DeepSeek-V4 with its DSpark stages over HTTP: answers, log probabilities, window, acceptance.

The log probabilities are held against the training twin, whose logits are those of transformers (see
`tests/unit/test_tiny_v4_model.py`). What is left between them is bfloat16 and the fp8 cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dspark_deploy.tiny import language
from dspark_deploy.tiny.checkpoint import verify
from dspark_deploy.tiny.v4.export import read_checkpoint
from tests.engine.served import EXTRA_SET, served
from tuning.acceptance import acceptance_between, parse_metrics

PATCHES = ("cpu-v4-draft", "cpu-v4-experts", "cpu-v4-tile-scheduler", "cpu-v4-windows")
WINDOW = 128


def _differences(twin: Any, tokenizer: Any, prompt: str, choice: dict[str, Any]) -> list[float]:
    """How far the log probability of each answered token is from the twin's, in nats."""
    before, after = tokenizer.encode(prompt).ids, tokenizer.encode(choice["text"]).ids
    with torch.no_grad():
        scores = twin(torch.tensor([before + after]))[0].log_softmax(-1)
    found = choice["logprobs"]["token_logprobs"]
    places = range(len(before) - 1, len(before) + len(after) - 1)
    return [
        abs(float(scores[place, token]) - logprob)
        for place, token, logprob in zip(places, after, found, strict=False)
    ]


def test_deepseek_v4_drafts_for_itself(tmp_path: Path) -> None:
    twin, _, tokenizer = read_checkpoint(verify("tiny-v4"))
    asked = language.problems(language.ACCURACY_SEEDS[0], 8)
    prompts = [language.prompt(each) for each in asked]
    shots = "".join(f"{language.prompt(each)} {each.solution}\n" for each in asked[4:6])
    with served(tmp_path, "--profile", "cpu-v4.yaml") as server:
        worker = server.ready["processes"][-1]
        states = {patch["name"]: patch["state"] for patch in worker["patches"]}
        assert [states[name] for name in PATCHES] == ["applied"] * len(PATCHES)
        assert states["cpu-v4-kernels"] in ("applied", "upstream")
        assert worker["numerics"]["state"] == "passed"
        with server.client() as client:
            before = parse_metrics(client.get("/metrics").text)
            body = {"model": "tiny-v4", "max_tokens": 96, "temperature": 0, "logprobs": 1}
            choices = client.post("/v1/completions", json=body | {"prompt": prompts}).json()["choices"]
            found = acceptance_between(before, parse_metrics(client.get("/metrics").text))
            long = [shots + prompt for prompt in prompts[:2]]
            beyond = client.post("/v1/completions", json=body | {"prompt": long, "max_tokens": 40}).json()
            assert min(len(tokenizer.encode(prompt).ids) for prompt in long) > WINDOW
    right = [language.final_answer(c["text"]) == p.answer for c, p in zip(choices, asked, strict=True)]
    assert sum(right) >= 7
    assert found.length > 3.5 or EXTRA_SET
    near = [d for p, c in zip(prompts, choices, strict=True) for d in _differences(twin, tokenizer, p, c)]
    far = [
        d for p, c in zip(long, beyond["choices"], strict=True) for d in _differences(twin, tokenizer, p, c)
    ]
    assert len(near) > 200 and sum(near) / len(near) < 0.03, sum(near) / len(near)
    assert len(far) > 50 and sum(far) / len(far) < 0.15, sum(far) / len(far)
