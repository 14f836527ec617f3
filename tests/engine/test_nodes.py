"""One engine of two nodes, both on this machine: vLLM's own multi-node start, as rendered files call it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from dspark_deploy.tiny import language
from tests.engine.served import Served, all_gone

pytestmark = pytest.mark.engine
NODES = ("--set", "engine.args.nnodes=2", "--set", "engine.args.data-parallel-size=2")


def test_two_nodes_are_ready_and_the_head_answers(tmp_path: Path) -> None:
    problem = language.problems(language.ACCURACY_SEEDS[0], 1)[0]
    with ExitStack() as stack:
        servers = []
        for rank in range(2):
            folder = tmp_path / str(rank)
            folder.mkdir()
            place = ("--node-rank", str(rank), "--head-address", "127.0.0.1")
            servers.append(Served(folder, *NODES, *place))
            stack.callback(servers[-1].end)
        for server in servers:
            server.wait_ready()
        head, worker = servers
        assert worker.ready["url"] == "", "it has no API server, and is ready by its workers"
        assert len([each for each in worker.ready["processes"] if "resolved" in each]) == 1
        with head.client() as client:
            body = {"model": "tiny", "max_tokens": 96, "temperature": 0, "prompt": language.prompt(problem)}
            answers = [client.post("/v1/completions", json=body).json() for _ in range(4)]
        texts = {answer["choices"][0]["text"] for answer in answers}
        assert len(texts) == 1 and language.final_answer(texts.pop()) is not None
        family = head.family() + worker.family()
        assert [server.end() for server in servers] == [130, 130]
        assert all_gone(family)
