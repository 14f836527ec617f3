"""What vLLM made of its flags: read from its configuration, compared with the profile and judged."""

from __future__ import annotations

import json
from enum import Enum, IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dspark_deploy.errors import EngineStartError
from dspark_deploy.launch import resolved as comparing
from dspark_deploy.launch.engine import Engine
from dspark_deploy.launch.rundir import RunDirectory
from dspark_deploy.plugin import resolved as reading
from dspark_deploy.plugin.registry import State
from dspark_deploy.preflight import Severity
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load

SPECULATIVE = {
    "method": "dspark",
    "model": "/models/draft",
    "num_speculative_tokens": 5,
    "draft_sample_method": "greedy",
    "rejection_sample_method": "standard",
}


def report(
    flags: dict[str, Any] | None = None, workers: int = 1, model: str = "/models/target", **speculative: Any
) -> dict[str, Any]:
    """A worker's report of an engine that runs what the test profile asks for, changed as given."""
    section = {
        "workers": workers,
        "model": model,
        "flags": flags or {},
        "speculative": SPECULATIVE | speculative,
    }
    return {"pid": 1, "patches": [], "resolved": section}


def compared(
    folder: Path, *sets: str, extra: tuple[str, ...] = (), text: str = TEXT, **found: Any
) -> list[comparing.Difference]:
    return comparing.differences(load(folder, text, list(sets)), good_facts(), extra, [report(**found)])


def test_nothing_to_say_of_what_came_through(tmp_path: Path) -> None:
    asked = ("engine.args.max-num-seqs=16", "engine.args.dtype=half", "engine.args.kv-cache-dtype=fp8")
    asked += ("engine.args.max-model-len=128k", "engine.args.moe-backend=auto", "engine.args.seed=1")
    flags = {"max-num-seqs": 16, "dtype": "float16", "kv-cache-dtype": "fp8_ds_mla", "max-model-len": 131072}
    assert compared(tmp_path, *asked, flags={**flags, "moe-backend": "triton", "block-size": 256}) == []


@pytest.mark.parametrize(
    ("name", "asked", "chosen"),
    [
        ("max-num-seqs", "16", 8),
        ("enable-prefix-caching", "true", False),
        ("enable-chunked-prefill", "false", True),
        ("max-num-batched-tokens", "512", 2048),
        ("dtype", "float16", "bfloat16"),
        ("kv-cache-dtype", "fp8", "auto"),
        ("attention-backend", "FLASHMLA", "TRITON_MLA"),
        ("tensor-parallel-size", "4", 1),
        ("cudagraph-capture-sizes", "[6, 12]", [6]),
    ],
)
def test_a_flag_that_vllm_changed_is_a_warning(tmp_path: Path, name: str, asked: str, chosen: Any) -> None:
    text = TEXT.replace("port: 8123", f"port: 8123\n  args:\n    {name}: {asked}")
    (found,) = compared(tmp_path, text=text, flags={name: chosen})
    assert (found.setting, found.chosen, found.severity) == (name, chosen, Severity.WARNING)
    assert found.where == "test.yaml:8"
    assert compared(tmp_path, text=text, extra=(f"--{name}=x",), flags={name: chosen}) == [], "after --"
    assert compared(tmp_path, text=text, extra=(f"--no-{name}",), flags={name: chosen}) == []
    assert comparing.refusal([found]) is None


def test_a_graph_mode_inside_the_compilation_config(tmp_path: Path) -> None:
    asked = "engine.args.compilation-config={cudagraph_mode: FULL, mode: 3}"
    flags = {"compilation-config.cudagraph_mode": "FULL_DECODE_ONLY", "compilation-config.mode": 3}
    (found,) = compared(tmp_path, asked, flags=flags)
    assert found.setting == "compilation-config.cudagraph_mode" and "graphs" in found.why


def test_capture_sizes_that_we_rendered_are_asked_for(tmp_path: Path) -> None:
    text = TEXT.replace("platform: cpu", "platform: cuda")
    kept = compared(
        tmp_path, "engine.args.max-num-seqs=2", text=text, flags={"cudagraph-capture-sizes": [1, 6, 12]}
    )
    lost = compared(
        tmp_path, "engine.args.max-num-seqs=2", text=text, flags={"cudagraph-capture-sizes": [1, 6]}
    )
    assert kept == [] and [each.setting for each in lost] == ["cudagraph-capture-sizes"]


@pytest.mark.parametrize(
    ("found", "setting"),
    [
        ({"method": "mtp"}, "speculative.method"),
        ({"num_speculative_tokens": 3}, "speculative.num_speculative_tokens"),
        ({"model": "/models/target"}, ""),
        ({"flags": {"model": 1}, "draft_sample_method": "probabilistic"}, "speculative.draft_sample_method"),
    ],
)
def test_another_speculation(tmp_path: Path, found: dict[str, Any], setting: str) -> None:
    """Method and k are errors; how a draft is sampled is a warning."""
    differences = compared(tmp_path, **found)
    assert [each.setting for each in differences] == ([setting] if setting else [])
    refused = comparing.refusal(differences)
    if setting in ("speculative.method", "speculative.num_speculative_tokens"):
        assert refused is not None and refused.exit_code == 5 and setting in str(refused)
        assert "test.yaml" in str(refused)
    else:
        assert refused is None
    assert compared(tmp_path, extra=("--speculative-config={}",), **found) == []


def test_another_model_draft_or_none_at_all_is_an_error(tmp_path: Path) -> None:
    def errors(*sets: str, change: dict[str, Any] | None = None, **found: Any) -> list[str]:
        told = report(**found)
        told["resolved"] |= change or {}
        seen = comparing.differences(load(tmp_path, TEXT, list(sets)), good_facts(), (), [told])
        return [each.setting for each in seen if each.severity is Severity.ERROR]

    assert errors() == []
    assert errors(model="/models/other") == ["model"]
    assert errors(change={"speculative": SPECULATIVE | {"model": "/models/other"}}) == ["speculative.model"]
    assert errors(change={"speculative": None}) == ["speculative"]
    assert errors("speculative=null") == ["speculative"]
    hub = "model.path=org/name"
    assert errors(hub, model="/root/.cache/huggingface/hub/models--org--name/snapshots/abc") == []
    assert errors(hub, model="org/other") == ["model"]


def test_differences_are_shown_and_none_is_silence(tmp_path: Path) -> None:
    console = Console(record=True, width=140)
    comparing.show(console, [])
    assert console.export_text() == ""
    comparing.show(console, compared(tmp_path, "engine.args.max-num-seqs=16", flags={"max-num-seqs": 8}))
    shown = console.export_text()
    assert "max-num-seqs" in shown and "16" in shown and "8" in shown and "--set" in shown


def engine(
    folder: Path, reports: list[dict[str, Any]], extra: tuple[str, ...] = (), limit: float = 5
) -> Engine:
    """An engine that runs on, and whose processes have left these reports."""
    run = RunDirectory(folder)
    run.processes.mkdir()
    run.log.write_text("")
    for number, each in enumerate(reports):
        (run.processes / f"{number}.json").write_text(json.dumps(each))
    process: Any = SimpleNamespace(poll=lambda: None, stop=lambda: 0, pid=1)
    return Engine(
        process, load(folder, TEXT, [f"engine.ready_timeout_s={limit:.0f}"]), run, 9, good_facts(), extra
    )


def test_a_node_without_an_api_server_is_ready_when_its_workers_are(tmp_path: Path) -> None:
    waiting = engine(tmp_path, [report(workers=2)], ("--headless",), 1)
    with pytest.raises(EngineStartError, match="not ready within 1 s"):
        waiting.wait_ready()
    (tmp_path / "processes" / "other.json").write_text(json.dumps(report(workers=2)))
    ready = waiting._ready(1.0)
    assert ready.url == "" and waiting._joined()


def test_another_engine_is_exit_code_5(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="another than was asked for") as refused:
        engine(tmp_path, [report(num_speculative_tokens=3)], ("--headless",)).wait_ready()
    assert refused.value.exit_code == 5 and "asked for 5, and vLLM runs 3" in str(refused.value)


class Mode(Enum):
    FULL = (1, 2)


class Dtype:
    def __str__(self) -> str:
        return "torch.bfloat16"


class Level(IntEnum):
    THREE = 3


def configuration() -> Any:
    """As much of a VllmConfig as is read, with fields of other releases left out."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model="/models/target", dtype=Dtype(), max_model_len=256),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, world_size=2),
        compilation_config=SimpleNamespace(
            cudagraph_mode=Mode.FULL, mode=Level.THREE, cudagraph_capture_sizes=[1]
        ),
        speculative_config=SimpleNamespace(**SPECULATIVE, num_speculative_tokens_per_batch_size=[(1, 4, 5)]),
    )


def test_the_configuration_is_read_as_plain_values() -> None:
    found = reading.resolved(configuration())
    assert json.loads(json.dumps(found)) == found
    assert found["workers"] == 2 and found["model"] == "/models/target"
    assert found["flags"]["dtype"] == "bfloat16"
    assert found["flags"]["compilation-config.cudagraph_mode"] == "FULL"
    assert found["flags"]["compilation-config.mode"] == 3
    assert "moe-backend" not in found["flags"], "this release has no such field"
    assert found["speculative"]["num_speculative_tokens_per_batch_size"] == [[1, 4, 5]]
    assert (
        reading.resolved(SimpleNamespace(**{**vars(configuration()), "speculative_config": None}))[
            "speculative"
        ]
        is None
    )


def test_the_worker_reports_after_its_kv_cache() -> None:
    class Worker:
        def __init__(self) -> None:
            self.vllm_config = configuration()

        def initialize_from_config(self, blocks: int) -> int:
            self.vllm_config.compilation_config.cudagraph_mode = Mode.FULL
            return blocks

    module = ModuleType(reading.WORKER)
    written, sections = [], {}
    module.Worker = Worker  # type: ignore[attr-defined]
    found = reading.patch(
        module, lambda name, content: sections.update({name: content()}), lambda: written.append(1)
    )
    assert found.examine().state is not State.REFUSED
    found.install()
    assert Worker().initialize_from_config(7) == 7 and written
    assert sections["resolved"]["flags"]["max-num-seqs"] == 4


def test_a_worker_without_that_step_is_refused_and_serves_on() -> None:
    module = ModuleType(reading.WORKER)
    module.Worker = type("Worker", (), {})  # type: ignore[attr-defined]
    found = reading.patch(module, lambda name, content: None, lambda: None)
    assert found.examine().state is State.REFUSED and not found.required
