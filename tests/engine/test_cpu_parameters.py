"""The CPU engine with twins says what vLLM's own CPU runner says, whatever a request asks for.

    pytest tests/engine/test_cpu_parameters.py

vLLM's V1 runner without the plugin, in a process of its own, against the V2 runner with twins: without
speculation, with greedy drafts, and with probabilistic ones, one engine after the other in a process. Greedy
requests must agree token for token; sampled ones must be answered, by the rules of their parameters. Not
asked: min_p and logit_bias, which vLLM refuses where it speculates. The pair of checkpoints is the package's,
or the one that DSPARK_TINY_PAIR names. `DSPARK_ENGINE_TESTS_SET=engine.cpu_twins=false` takes the twins out,
as in the other engine tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.served import EXTRA_SET

ROOT = Path(__file__).resolve().parents[2]
PAIR = Path(os.environ.get("DSPARK_TINY_PAIR", ROOT / "dspark_deploy" / "tiny" / "weights" / "tiny-qwen3"))
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(not (PAIR / "draft").is_dir(), reason=f"no pair of checkpoints in {PAIR}"),
]

GREEDY = {
    "plain": {},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.3},
    "allowed": {"allowed_token_ids": list(range(3, 200))},
    "minimum": {"min_tokens": 60, "max_tokens": 64},
    "stop": {"stop_token_ids": [30]},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2},
}
SAMPLED = {
    "top_k": {"temperature": 0.9, "top_k": 5, "seed": 1},
    "top_k 1": {"temperature": 0.9, "top_k": 1, "seed": 1},
    "top_p": {"temperature": 0.9, "top_p": 0.8, "seed": 1},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "presence_penalty": 0.2, "seed": 2},
}

CHILD = """
import gc, json, sys, tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import cpu_case

cases = [cpu_case.Case(**each) for each in json.loads(sys.argv[2])]
with tempfile.TemporaryDirectory() as folder:
    cpu_case.environment(cases[0], Path(folder))
    from vllm import SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    for number, case in enumerate(cases):
        llm = cpu_case.engine(case)
        for name, asked in json.loads(sys.argv[3]).items():
            asked = {"temperature": 0.0, "max_tokens": 40} | asked
            said = []
            for answer in llm.generate(cpu_case.prompts(3), SamplingParams(**asked), use_tqdm=False):
                logprobs = answer.outputs[0].logprobs or (answer.prompt_logprobs or [None])[1:]
                rows = [sorted((k, round(v.logprob, 2)) for k, v in row.items()) for row in logprobs]
                said.append({"tokens": list(answer.outputs[0].token_ids), "logprobs": rows})
            print("ANSWER", json.dumps([number, name, said]), flush=True)
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
"""


def answers(*cases: dict[str, object]) -> list[dict[str, list[dict[str, list]]]]:
    """What each engine says to every request, by name; all in one process, since an import takes longer than
    the requests. Fails with the process's last words if it died."""
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            CHILD,
            str(ROOT / "bench"),
            json.dumps([{"pair": str(PAIR)} | case for case in cases]),
            json.dumps(GREEDY | SAMPLED),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    said: list[dict[str, list[dict[str, list]]]] = [{} for _ in cases]
    for line in child.stdout.splitlines():
        if line.startswith("ANSWER "):
            number, name, answer = json.loads(line.removeprefix("ANSWER "))
            said[number][name] = answer
    assert child.returncode == 0, f"died after {list(map(list, said))}:\n{child.stderr[-3000:]}"
    return said


@pytest.fixture(scope="module")
def v1():
    return answers({"runner": "v1"})[0]


V2 = {
    "no speculation": {},
    "greedy drafts": {"k": 3},
    "probabilistic drafts": {"k": 3, "draft": "probabilistic", "rejection": "block"},
}


@pytest.fixture(scope="module")
def all_v2():
    twins = "engine.cpu_twins=false" not in EXTRA_SET
    return dict(zip(V2, answers(*({"twins": twins} | case for case in V2.values())), strict=True))


@pytest.fixture(params=V2)
def v2(request, all_v2):
    return all_v2[request.param]


def test_greedy_requests_agree(v1, v2):
    for name in GREEDY:
        for theirs, ours in zip(v1[name], v2[name], strict=True):
            assert ours["tokens"] == theirs["tokens"], name


def test_log_probabilities_agree(v1, v2):
    for name in ("logprobs", "prompt logprobs"):
        for theirs, ours in zip(v1[name], v2[name], strict=True):
            assert len(ours["logprobs"]) == len(theirs["logprobs"]) > 10
            for row, other in zip(ours["logprobs"], theirs["logprobs"], strict=True):
                assert [token for token, _ in row] == [token for token, _ in other]
                assert [value for _, value in row] == pytest.approx([value for _, value in other], abs=0.02)


def test_sampled_requests_are_answered(v1, v2):
    for name in SAMPLED:
        assert all(len(answer["tokens"]) > 5 for answer in v2[name]), name
    assert [a["tokens"] for a in v2["top_k 1"]] == [a["tokens"] for a in v1["plain"]]
