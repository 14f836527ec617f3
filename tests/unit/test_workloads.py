"""What is sent: workloads from files, seeds that rotate, `vllm bench serve`'s flags, the machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dspark_deploy.errors import InputError
from tests.support.simulated_engine import SimulatedEngine
from tests.unit.facts import good_facts
from tests.unit.profiles import load
from tuning import conditions
from tuning.arms import arms
from tuning.endpoint import Endpoint, RequestFailed, Sampling
from tuning.load import Load, _arguments, read_result
from tuning.measurement import batch_shapes, instrumented, notes
from tuning.workload import RandomTokens, Requests, find_workload


def write_prompts(path: Path, count: int = 40) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(count)))
    return path


def test_levels_repeats_and_warm_up_share_no_prompt(tmp_path: Path) -> None:
    workload = find_workload("jsonl", write_prompts(tmp_path / "p.jsonl"))
    warm = workload.warm_up_prompts(14)
    assert len(warm) == 14 and sum(prompt.startswith("prompt") for prompt in warm) == 10
    drawn = [*warm]
    for level in range(3):
        drawn += workload.requests(level, 10).prompts
    assert len(set(drawn)) == len(drawn) == 44
    with pytest.raises(InputError, match="fewer --requests"):
        workload.requests(3, 10)
    assert workload.requests(0, 10, repeat=1).prompts == workload.requests(1, 10).prompts


def test_files_in_their_three_forms(tmp_path: Path) -> None:
    sharegpt = tmp_path / "s.json"
    talks = [
        [{"value": "hello"}, {"value": "hi"}],
        [{"value": "alone"}],
        [{"value": "hello"}, {"value": "x"}],
    ]
    sharegpt.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    found = find_workload("sharegpt", sharegpt)
    assert found.requests(0, 1).prompts == ["hello"], "once: its second time would hit the prefix cache"
    folder = tmp_path / "speed"
    folder.mkdir()
    row = {"messages": [{"content": "write code"}], "category": "coding"}
    other = {"messages": [{"content": "translate"}], "category": "multilingual"}
    (folder / "qualitative.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    assert find_workload("speed-bench", folder).requests(0, 2).prompts == ["write code", "translate"]
    coding = find_workload("speed-bench-coding", folder)
    assert (coding.name, coding.requests(0, 1).prompts) == ("speed-bench-coding", ["write code"])
    prose = tmp_path / "prose.jsonl"
    prose.write_text('{"prompt": "Once upon a time"}\n')
    assert find_workload("jsonl", prose).name == "prose"
    for name, path in (
        ("sharegpt", folder / "qualitative.jsonl"),
        ("jsonl", sharegpt),
        ("jsonl", tmp_path / "no"),
        ("speed-bench-codnig", folder),
    ):
        with pytest.raises(InputError):
            find_workload(name, path)
    assert found.fingerprint() != find_workload("speed-bench", folder).fingerprint()


def test_random_tokens_rotate_their_seed_and_rank_nothing() -> None:
    workload = RandomTokens(64, 32)
    flags = [workload.requests(level, 8, repeat).arguments for level in (0, 1) for repeat in (0, 1)]
    seeds = {arguments[arguments.index("--seed") + 1] for arguments in flags}
    assert len(seeds) == 4 and "64" in flags[0] and "32" in flags[0]
    assert workload.ranks_k is False
    assert len(set(workload.warm_up_prompts(20))) == 20


def given(load: Load, folder: Path) -> dict[str, Any]:
    """Flags by name; True for one without a value."""
    found: dict[str, Any] = {}
    name = ""
    for part in _arguments(load, folder):
        if part.startswith("--"):
            name, found[part] = part, True
        else:
            found[name] = part if found[name] is True else f"{found[name]} {part}"
    return found


def test_a_closed_and_an_open_loop(tmp_path: Path) -> None:
    closed = given(Load(8, Requests(2, ["a", "b"]), 96, 0.5), tmp_path)
    assert closed["--max-concurrency"] == "8" and "--request-rate" not in closed
    assert closed["--temperature"] == "0.5" and closed["--custom-output-len"] == "96"
    assert [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()] == [
        "a",
        "b",
    ]
    opened = given(
        Load(8, Requests(2, ["a", "b"]), 96, 0.0, 2.5, True, True, {"ttft": 200.0, "tpot": 12.5}), tmp_path
    )
    assert opened["--request-rate"] == "2.5" and "--max-concurrency" not in opened
    assert opened["--goodput"] == "ttft:200 tpot:12.5" and opened["--ignore-eos"] is True
    assert (opened["--backend"], opened["--endpoint"]) == ("openai-chat", "/v1/chat/completions")
    seed = given(Load(1, RandomTokens().requests(0, 8), 1024, 0.0, None, True), tmp_path)
    assert (
        seed["--random-input-len"] == seed["--random-output-len"] == "1024" and seed["--num-prompts"] == "8"
    )


@pytest.mark.parametrize(
    ("args", "widest", "expected"),
    [
        ({"enforce-eager": True}, 8, [1, 2, 4, 8]),
        ({"enforce-eager": True}, 6, [1, 2, 4, 6]),
        ({}, 1, [1]),
    ],
)
def test_warm_up_shapes_without_captured_graphs(
    tmp_path: Path, args: dict[str, Any], widest: int, expected: list[int]
) -> None:
    profile = load(tmp_path).revised({"engine.args": args}).profile
    assert batch_shapes(profile, widest) == expected


def test_warm_up_covers_each_captured_batch_size(tmp_path: Path) -> None:
    changes = {"hardware.platform": "rocm", "engine.args": {"max-num-seqs": 256}}
    profile = load(tmp_path).revised(changes).profile
    assert batch_shapes(profile, 12) == list(range(1, 13))
    many = batch_shapes(profile, 256)
    assert len(many) <= 65 and many[0] == 1 and many[-1] == 256


def test_an_engine_is_instrumented_only_where_nobody_else_reaches_it(tmp_path: Path) -> None:
    facts = good_facts(features={"per_request_acceptance": True})
    engine = instrumented(load(tmp_path), facts).profile.engine
    assert engine.env == {"VLLM_SERVER_DEV_MODE": "1"}
    assert engine.args == {"per-request-spec-decode-metrics": "summary"}
    public = load(tmp_path).revised({"engine.host": "0.0.0.0"})
    assert instrumented(public, good_facts()).profile.engine == public.profile.engine
    without = load(tmp_path).revised({"speculative": None})
    assert instrumented(without, facts).profile.engine.args == {}, "vLLM stops at the flag"


def test_arms_that_cant_run_say_why(tmp_path: Path) -> None:
    facts = good_facts(features={"adaptive_verification": True})
    found = {arm.name: arm for arm in arms(load(tmp_path), facts, ["adaptive", "reference", "fixed"])}
    assert list(found) == ["reference", "fixed", "adaptive"], "always in this order"
    assert not found["reference"].refused and not found["fixed"].refused
    assert found["adaptive"].refused
    none = load(tmp_path).revised({"speculative": None})
    assert "no speculative section" in arms(none, facts, ["fixed"])[0].refused
    rocm = load(tmp_path).revised({"hardware.platform": "rocm"})
    old = arms(rocm, good_facts(features={"block_guard": True}), ["adaptive"])[0]
    assert "no adaptive verification" in old.refused


def test_conditions_from_the_kernels_files(tmp_path: Path) -> None:
    hwmon = tmp_path / "drm" / "card0" / "device" / "hwmon" / "hwmon3"
    hwmon.mkdir(parents=True)
    (hwmon / "temp2_input").write_text("61000\n")
    (hwmon / "freq1_input").write_text("2100000000\n")
    cpu = tmp_path / "cpu" / "cpu0" / "cpufreq"
    cpu.mkdir(parents=True)
    (cpu / "scaling_cur_freq").write_text("2400000\n")
    found = conditions.snapshot(tmp_path / "drm", tmp_path / "cpu", tmp_path / "none")
    assert found["gpus"] == [{"celsius": 61.0, "mhz": 2100.0}] and found["cpu_mhz"] == 2400
    assert "cpu_celsius" not in found, "what isn't told is left out"
    bare = conditions.snapshot(tmp_path / "none", tmp_path / "none", tmp_path / "none")
    assert set(bare) == {"load_1_min", "cores"}


def test_nvidias_clocks_that_are_held_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x24,
        nvmlDeviceGetTemperature=lambda handle, kind: 84,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1200,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    found = conditions.snapshot(tmp_path, tmp_path, tmp_path)
    assert conditions.throttled(found) == ["GPU 0: clocks held back by power cap, temperature"]


def test_notes_of_a_load_level() -> None:
    result = read_result(SimulatedEngine().bench(10, 4, late_ms=500), 4)
    found = notes(result, [{"load_1_min": 9.0, "cores": 2}])
    assert [
        "ramp and drain" in found[0],
        "client was late" in found[1],
        "machine was loaded" in found[2],
    ] == [True] * 3
    calm = read_result(SimulatedEngine().bench(60, 4), 4)
    assert notes(calm, [{"load_1_min": 0.5, "cores": 2}]) == []


def test_an_endpoint_finds_its_model_and_keeps_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    seen: list[str] = []

    def server(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return SimulatedEngine().handle(request)

    with Endpoint.find("http://e/v1/", None, httpx.MockTransport(server)) as endpoint:
        assert (endpoint.url, endpoint.model) == ("http://e", "simulated")
        assert endpoint.chat([{"role": "user", "content": "?"}], Sampling(5)).text == "so #### 7"
    assert set(seen) == {"Bearer sk-secret"}
    with pytest.raises(InputError, match="serves simulated"):
        Endpoint.find("http://e", "other", httpx.MockTransport(server))
    refused = httpx.MockTransport(lambda _: httpx.Response(401, text="no key"))
    with pytest.raises(InputError) as error:
        Endpoint.find("http://e", None, refused)
    assert "OPENAI_API_KEY" in str(error.value) and "sk-secret" not in str(error.value)
    with Endpoint("http://e", "m", refused) as endpoint, pytest.raises(RequestFailed, match="401: no key"):
        endpoint.complete("p", Sampling(1))
