"""From a sweep's folder to the launch: the profile of the goal, by the same preflight and command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy import serve
from tests.support.cli import Tune
from tests.support.stand_in import StandIn
from tests.support.sweeps import SWEEP, sweep
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    monkeypatch.setattr(serve, "probe", lambda profile: good_facts())
    return Tune(monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep whose goals have different answers."""
    sweep(tmp_path, StandIn(token_ms=3.0), SWEEP)
    return tmp_path / "out"


def config(document: dict[str, Any]) -> dict[str, Any]:
    command = document["command"]
    if "--speculative-config" not in command:
        return {}
    found: dict[str, Any] = json.loads(command[command.index("--speculative-config") + 1])
    return found


def test_each_goal_is_served_by_its_profile(tune: Tune, folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    served = {}
    for goal in ("latency", "throughput"):
        done = tune("serve-best", folder, "--goal", goal, "--dry-run")
        assert done.code == 0, done.stderr
        k = config(done.document).get("num_speculative_tokens", 0)
        assert result["goals"][goal]["best"] == (f"k{k}-greedy" if k else "none")
        assert f"for {goal}" in done.stderr
        served[goal] = k
    assert served["latency"] > served["throughput"], "they differ, so the goal is heard"
    own = tune("serve-best", folder, "--dry-run")
    assert config(own.document)["num_speculative_tokens"] == served["latency"]


def test_values_can_be_set_and_the_preflight_is_asked(tune: Tune, folder: Path) -> None:
    done = tune("serve-best", folder, "--set", "engine.port=9001", "--dry-run")
    assert "9001" in done.document["command"]
    assert tune("serve-best", folder, "--check").document["verdict"] == "ok"
    refused = tune("serve-best", folder, "--set", "engine.vllm='>=9'", "--check")
    assert refused.code == 3 and refused.document["findings"][0]["code"] == "VLLM_VERSION"
    assert tune("serve-best", folder, "--set", "engine.vllm='>=9'").code == 3


def test_a_launch_is_dspark_serves_own(tune: Tune, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "_serve", lambda console, loaded, *rest: started.append(loaded.source))
    with pytest.raises(IndexError):  # nothing was printed: a server's document comes when it is ready
        tune("serve-best", folder, "--goal", "throughput")
    assert started == [folder / "best-throughput.yaml"]


@pytest.mark.parametrize(
    ("goal", "message"), [("slo", "has no answer for slo; it has: latency, throughput"), ("speed", "speed")]
)
def test_a_goal_without_an_answer(tune: Tune, folder: Path, goal: str, message: str) -> None:
    done = tune("serve-best", folder, "--goal", goal)
    assert done.code == 2 and message in done.document["error"]


@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"goals": [], "settings": {}}'])
def test_a_folder_without_a_result(tune: Tune, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    done = tune("serve-best", tmp_path)
    assert done.code == 2 and "no result of a sweep" in done.document["error"]


def test_a_profile_that_is_gone(tune: Tune, folder: Path) -> None:
    (folder / "best.yaml").unlink()
    done = tune("serve-best", folder)
    assert done.code == 2 and "measures nothing twice" in done.document["error"]


def test_the_proxy_serves_databases_only(tune: Tune, tmp_path: Path) -> None:
    done = tune("storage-proxy", "--storage", f"journal:///{tmp_path}/x.log")
    assert done.code == 2 and "the proxy serves postgresql" in done.stderr


def test_the_profile_of_the_tests_is_what_is_served(folder: Path) -> None:
    assert (folder / "best.yaml").read_text().count("draft: /models/draft") == TEXT.count(
        "draft: /models/draft"
    )
