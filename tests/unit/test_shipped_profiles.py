"""The shipped profiles: each loads, and passes on the machine it is for; the recipe is rendered exactly."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_deploy.launch import command as rendering
from dspark_deploy.preflight import Facts, Severity, check
from dspark_deploy.preflight.checkpoint import Checkpoint
from dspark_deploy.preflight.vllm_build import choices, vllm_folder
from dspark_deploy.profile import load_profile
from dspark_deploy.profile.loading import find_profile
from tests.unit.findings import FEATURES
from tuning.gsm8k.protocols import PROTOCOLS
from tuning.workload import WORKLOADS

FOLDER = find_profile("cpu-tiny.yaml").parent
BUILT_IN = ("cpu-tiny", "cpu-v4", "cuda-tiny")  # whose checkpoints come in the package
DEPLOYMENTS = sorted(path.name for path in FOLDER.glob("*.yaml") if path.stem not in BUILT_IN)
NOT_OURS = {"--host", "--port", "--served-model-name"}


def machine(name: str) -> Facts:
    """Facts of the machine that a profile is for, with the model's name on the hub."""
    profile = load_profile(FOLDER / name).profile
    hardware = profile.hardware
    assert hardware.arch is not None
    return Facts(
        python="3.12",
        versions={"vllm": "0.33.0", "amd-aiter": "0.1.14", "tilelang": "0.1.12"},
        gpu_platform=hardware.platform,
        gpus=[hardware.arch] * hardware.gpus,
        features=FEATURES,
        port_free=True,
        model=Checkpoint(profile.model.path),
    )


def flags(command: list[str]) -> dict[str, list[str]]:
    """Flag -> values, of what follows the model."""
    found: dict[str, list[str]] = {}
    for part in command[command.index("serve") + 2 :]:
        if part.startswith("--"):
            found[part] = values = []
        else:
            values.append(part)
    return found


def test_the_published_recipe_is_rendered_exactly() -> None:
    loaded = load_profile(FOLDER / "mi355x-v41-flash.yaml")
    command = rendering.serve_command(loaded.profile, machine("mi355x-v41-flash.yaml"), 8000, [])
    rendered = {name: values for name, values in flags(command).items() if name not in NOT_OURS}
    speculative = json.loads(rendered.pop("--speculative-config")[0])
    assert command[command.index("serve") + 1] == "deepseek-ai/DeepSeek-V4.1-Flash"
    assert rendered == {
        "--tokenizer-mode": ["deepseek_v41"],
        "--tool-call-parser": ["deepseek_v41"],
        "--enable-auto-tool-choice": [],
        "--reasoning-parser": ["deepseek_v41"],
        "--tensor-parallel-size": ["4"],
        "--gpu-memory-utilization": ["0.9"],
        "--moe-backend": ["aiter"],
    }
    assert speculative == {
        "method": "dspark",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
        "enable_adaptive_verification": False,
    }
    assert loaded.profile.engine.env == {
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
        "VLLM_ROCM_USE_AITER": "1",
        "VLLM_ROCM_USE_AITER_MOE": "1",
        "AITER_TRITON_LOG_LEVEL": "ERROR",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    }


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_profile_passes_on_the_machine_it_is_for(name: str) -> None:
    facts = replace(machine(name), vllm_choices=choices(vllm_folder()))
    found = check(load_profile(FOLDER / name), facts)
    assert [str(finding) for finding in found if finding.severity is not Severity.NOTE] == []


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_profile_names_its_sources(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert text.startswith("#"), "a comment says what the profile is"
    assert re.search(r"Sources?\b|recipe|architecture", text), "and where its settings come from"
    assert load_profile(FOLDER / name).profile.name == Path(name).stem


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_an_expected_range_names_its_source_and_a_workload_that_can_be_measured(name: str) -> None:
    own = {"prose"}  # a JSONL file of one's own, by its name
    known = {*WORKLOADS, "speed-bench-coding", "gsm8k", *(f"gsm8k/{each}" for each in PROTOCOLS), *own}
    for expected in load_profile(FOLDER / name).profile.expect:
        assert expected.source, f"{name}: where is the range for {expected.workload} from?"
        assert expected.workload in known


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_range_is_not_inherited_from_another_gpu(name: str) -> None:
    """`extends` takes settings over, and what was measured with them on another GPU as well."""
    file = load_profile(FOLDER / name).where("expect").partition(":")[0]
    assert file.partition("-")[0].removesuffix(".yaml") == name.partition("-")[0].removesuffix(".yaml")


def test_the_text_profile_is_the_recipe_with_what_the_benchmark_added() -> None:
    text, recipe = (load_profile(FOLDER / f"mi355x-v41-flash{end}.yaml").profile for end in ("-text", ""))
    added = {
        "language-model-only": True,
        "max-model-len": 1048576,
        "max-num-seqs": 128,
        "max-num-batched-tokens": 16384,
        "max-cudagraph-capture-size": 1024,
        "disable-uvicorn-access-log": True,
    }
    assert text.engine.args == recipe.engine.args | added
    frontend = {"OMP_NUM_THREADS": "1", "VLLM_USE_RUST_FRONTEND": "1"}
    assert text.engine.env == recipe.engine.env | frontend
    assert text.speculative == recipe.speculative


def test_the_upstream_variant_is_the_recipe_with_tilelang_and_a_gate() -> None:
    variant, recipe = (
        load_profile(FOLDER / f"mi355x-v41-flash{end}.yaml").profile for end in ("-tilelang", "")
    )
    assert (variant.mhc.provider, variant.mhc.gate) == ("tilelang", "refuse")
    assert recipe.mhc.provider == "auto"
    assert (variant.engine, variant.speculative) == (recipe.engine, recipe.speculative)


def test_every_verification_step_of_a_known_batch_has_a_graph() -> None:
    loaded = load_profile(FOLDER / "cuda-tiny.yaml", ["engine.args.max-num-seqs=4"])
    rendered = flags(rendering.serve_command(loaded.profile, machine("h200-v41-flash.yaml"), 8000, []))
    assert rendered["--cudagraph-capture-sizes"] == ["6", "12", "18", "24"]
    plain = loaded.revised({"speculative": None})
    assert rendering.capture_sizes(plain.profile) == [], "without drafts vLLM's own list is right"
    own = loaded.revised({"engine.args.max-cudagraph-capture-size": 24})
    assert rendering.capture_sizes(own.profile) == [], "the profile has the last word"
