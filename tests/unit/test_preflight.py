"""Rules: each has an input that triggers it and one that does not; facts are read without torch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.errors import FileError, InputError
from dspark_deploy.launch.rundir import write_atomically
from dspark_deploy.preflight import Facts, Severity, check, probe
from dspark_deploy.preflight.aiter import defined_functions, positional_calls, read_aiter
from dspark_deploy.preflight.checkpoint import Checkpoint, read_checkpoint
from dspark_deploy.preflight.synthetic import config_of_flags, synthetic_faults
from dspark_deploy.tiny import checkpoint
from tests.unit.facts import good_facts
from tests.unit.findings import AITER, BASES, LOCAL, MI355X
from tests.unit.profiles import TEXT, load


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


def test_facts_are_shown_without_secrets_and_read_back(tmp_path: Path) -> None:
    secret = "https://someone:s3cret@cache.example/aiter"
    config = {"bos_token_id": 1, "auth": secret}
    known = good_facts(
        environment={"AITER_JIT_DIR": secret},
        caches=[replace(LOCAL, path=secret, free_gib=1.0)],
        model=Checkpoint("/models/target", "/models/target", config=config),
        api_key_set=True,
    )
    text = json.dumps(known.as_json())
    assert "s3cret" not in text
    (tmp_path / "facts.json").write_text(text)
    read = Facts.from_file(tmp_path / "facts.json")
    assert read.api_key_set and read.model is not None and read.model.config["bos_token_id"] == 1
    gpu_text, facts = BASES["mi355x"]
    said = check(load(tmp_path, gpu_text), replace(facts, caches=known.caches))
    assert [each.code for each in said] == ["DISK_LOW"] and "s3cret" not in str(said)


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
        '{"python": "3", "versions": {}, "model": {"name": "x", "weigth_bytes": 1}}',
        '{"python": "3", "versions": {}, "caches": [{"variable": "X", "free_gib": 1, "netwrok": ""}]}',
    ],
)
def test_bad_facts_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"facts\.json"):
        Facts.from_file(path)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            '"features": {"adaptive_verificaton": true}',
            "features.adaptive_verificaton: .*'adaptive_verification'",
        ),
        ('"environment": {"VLLM_PLUGIN": "x"}', "environment.VLLM_PLUGIN: .*'VLLM_PLUGINS'"),
        ('"gpus_names": []', "gpus_names: .*'gpu_names'"),
        ('"caches": [{"variable": "X", "path": "/", "fre_gib": 1}]', "caches.0.fre_gib: .*'free_gib'"),
        ('"aiter": {"function": {}}', "aiter.function: .*'functions'"),
        ('"aiter": {"functions": {"f": [1]}}', "aiter.functions.f"),
        ('"aiter": {"functions": {"f": [1, 2, 3]}}', "aiter.functions.f"),
        ('"aiter": {"calls": {"f": [-1]}}', "aiter.calls.f"),
        ('"gpu_memory_gib": [NaN]', "gpu_memory_gib.0"),
        ('"gpu_memory_gib": [288, Infinity]', "gpu_memory_gib.1"),
        ('"gpu_memory_gib": [-1]', "gpu_memory_gib.0"),
        ('"wavefront": -64', "wavefront"),
        ('"caches": [{"variable": "X", "path": "/", "free_gib": NaN}]', "caches.0.free_gib"),
        ('"caches": [{"variable": "X", "path": "/", "free_gib": -1}]', "caches.0.free_gib"),
        ('"model": {"name": "x", "weight_bytes": -1}', "model.weight_bytes"),
        ('"draft": {"name": "x", "draft_tensors": -1}', "draft.draft_tensors"),
    ],
)
def test_a_slip_in_facts_is_named(tmp_path: Path, part: str, says: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(f'{{"python": "3", "versions": {{}}, {part}}}')
    with pytest.raises(InputError, match=says):
        Facts.from_file(path)


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"vllm": "abc"}, r"versions\.vllm: 'abc' is no version"),
        ({"vllm": "0." + "9" * 5000}, r"versions\.vllm: '0\.9{38}' is no version"),
        ({"vlm": "0.33.0"}, r"versions\.vlm: .*'vllm'"),
    ],
)
def test_versions_in_facts_are_versions(tmp_path: Path, versions: dict[str, str], says: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"python": "3", "versions": versions}))
    with pytest.raises(InputError, match=says):
        Facts.from_file(path)


def test_checkpoints_on_disk(tmp_path: Path) -> None:
    assert "no folder" in read_checkpoint(str(tmp_path / "gone")).problem
    assert read_checkpoint("deepseek-ai/DeepSeek-V4.1-Flash").problem == ""
    assert "no config.json" in read_checkpoint(str(tmp_path)).problem
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in read_checkpoint(str(tmp_path)).problem
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "cannot be read" in read_checkpoint(str(tmp_path)).problem
    (tmp_path / "config.json").write_text('{"dspark_block_size": 5}')
    assert "no weights" in read_checkpoint(str(tmp_path)).problem
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert "no safetensors header" in read_checkpoint(str(tmp_path)).problem
    weights = shard({"mtp.0.attn.wq": [0, 2], "layers.0.attn.wq": [2, 6]}, 6)
    (tmp_path / "model.safetensors").write_bytes(weights)
    whole = read_checkpoint(str(tmp_path))
    assert whole.problem == "" and whole.trained_block == 5
    assert whole.draft_tensors == 1 and whole.weight_bytes == len(weights)


def shard(offsets: Mapping[str, object], size: int) -> bytes:
    """A safetensors file of tensors that end where `offsets` say, with `size` bytes of them."""
    tensors = {name: {"dtype": "U8", "data_offsets": place} for name, place in offsets.items()}
    header = json.dumps({**tensors, "__metadata__": {}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(
    ("offsets", "size", "problem"),
    [
        ({"a": [0, 2], "b": [2, 6]}, 5, "was the download cut off?"),
        ({"a": [0, 2], "b": [2, 6]}, 0, "was the download cut off?"),
        ({"a": [0, 2]}, 3, "was something written behind it?"),
        ({"a": [0]}, 1, "without data_offsets of a"),
        ({"a": [0, "2"]}, 2, "without data_offsets of a"),
        ({"a": None}, 0, "without data_offsets of a"),
    ],
)
def test_a_file_that_does_not_end_with_its_last_tensor(
    tmp_path: Path, offsets: dict[str, object], size: int, problem: str, indexed: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(shard(offsets, size))
    if indexed:
        index = {"weight_map": dict.fromkeys(offsets, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problem in read_checkpoint(str(tmp_path)).problem


def test_a_damaged_builtin_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(checkpoint.WEIGHTS / "tiny-v4", tmp_path / "tiny-v4")
    monkeypatch.setattr(checkpoint, "WEIGHTS", tmp_path)
    (tmp_path / "tiny-v4" / ".DS_Store").touch()
    assert read_checkpoint("builtin:tiny-v4").problem == ""
    (tmp_path / "tiny-v4" / "config.json").unlink()
    facts = good_facts(model=read_checkpoint("builtin:tiny-v4"))
    (found,) = check(load(tmp_path), facts)
    assert found.code == "BUILTIN_DAMAGED" and found.message.endswith("config.json: missing")
    (tmp_path / "tiny-v4" / "MANIFEST.json").unlink()
    assert "there is no built-in checkpoint" in read_checkpoint("builtin:tiny-v4").problem


@pytest.mark.parametrize(
    ("length", "config", "environment", "speaks"),
    [
        ("1025", {"max_position_embeddings": 1024}, {}, True),
        ("1024", {"max_position_embeddings": 1024}, {}, False),
        ("1.1k", {"max_position_embeddings": 1024}, {}, True),
        ("1k", {"max_position_embeddings": 1024}, {}, False),
        ("1K", {"max_position_embeddings": 1024}, {}, False),
        ("-1", {"max_position_embeddings": 1024}, {}, False),
        ("auto", {"max_position_embeddings": 1024}, {}, False),
        ("2048", {"max_position_embeddings": 1024, "model_max_length": 2048}, {}, False),
        (
            "2048",
            {"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 2}},
            {},
            False,
        ),
        ("2048", {"max_position_embeddings": 1024, "rope_scaling": {"type": "yarn", "factor": 2}}, {}, True),
        ("2048", {"max_position_embeddings": 1024}, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, False),
        ("2048", {"max_position_embeddings": "many"}, {}, False),
        ("2048", {}, {}, False),
    ],
)
def test_a_context_beyond_the_model_is_found(
    tmp_path: Path, length: str, config: dict[str, Any], environment: dict[str, str], speaks: bool
) -> None:
    model = Checkpoint("/models/target", "/models/target", config=config)
    facts = good_facts(model=model, environment=environment)
    found = check(load(tmp_path, sets=[f"engine.args.max-model-len={length}"]), facts)
    others = {"CONFIG_IMPOSSIBLE"} if config.get("max_position_embeddings") == "many" else set()
    assert {each.code for each in found} == {*["CONTEXT_TOO_LONG"] * speaks, *others}


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}, "lacks model-2"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "outside its folder"),
        ({"weight_map": [1]}, "cannot be read"),
        ({}, "cannot be read"),
        ([], "cannot be read"),
        ({"weight_map": {"a": 3}}, "cannot be read"),
    ],
)
def test_an_index_that_lies_is_found_out(tmp_path: Path, index: object, problem: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(b"x")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problem in read_checkpoint(str(tmp_path)).problem


def test_preflight_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys; import dspark_deploy.preflight, dspark_deploy.serve;"
        "print([m for m in ('torch', 'vllm', 'optuna', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_aiter_and_its_caller_are_parsed() -> None:
    functions = defined_functions("def f(a, b, c=1): ...\ndef g(*a): ...\nclass X: ...\n")
    assert functions == {"f": (2, 3), "g": (0, -1)}
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
    path.write_text(json.dumps(replace(MI355X, aiter=AITER).as_json()))
    assert Facts.from_file(path) == replace(MI355X, aiter=AITER)


def test_no_aiter_is_read_where_there_is_none() -> None:
    assert read_aiter() is None


SYNTHETIC = '"rejection_sample_method": "synthetic"'
DOTTED = ["--speculative-config.rejection_sample_method", "synthetic"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--speculative-conf", f"{{{SYNTHETIC}}}"], "SYNTHETIC_IN_SERVING"),
        (["--s", f"{{{SYNTHETIC}}}"], ""),
        ([*DOTTED, "--speculative-config.synthetic_acceptance_length", "3.5"], "SYNTHETIC_IN_SERVING"),
        (["--speculative-config", f'{{{SYNTHETIC}, "num_speculative_tokens": "x"}}'], "SYNTHETIC_UNREADABLE"),
        (["-sc", f'{{{SYNTHETIC}, "synthetic_acceptance_rates": 3}}'], "SYNTHETIC_UNREADABLE"),
    ],
)
def test_forced_acceptance_in_every_spelling_of_vllms(flags: list[str], says: str) -> None:
    codes = [fault.code for fault in synthetic_faults(config_of_flags(flags), "serve")]
    assert (says in codes) if says else codes == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::0", "", "000.0.0.0", "[::]"])
def test_every_spelling_of_every_interface_asks_for_a_key(tmp_path: Path, host: str) -> None:
    found = check(load(tmp_path, TEXT, [f'engine.host="{host}"']), good_facts())
    assert "OPEN_WITHOUT_KEY" in [each.code for each in found]
    keyed = load(tmp_path, TEXT, [f'engine.host="{host}"', 'engine.env.VLLM_API_KEY=""'])
    assert "OPEN_WITHOUT_KEY" in [each.code for each in check(keyed, good_facts())], "an empty key is none"
    for own in ("127.0.0.1", "10.0.0.1", "localhost"):
        alone = check(load(tmp_path, TEXT, [f"engine.host={own}"]), good_facts())
        assert "OPEN_WITHOUT_KEY" not in [each.code for each in alone]


@pytest.mark.parametrize(
    ("value", "platform", "few"),
    [
        ("HIP_VISIBLE_DEVICES='0,1,2'", "rocm", True),
        ("HIP_VISIBLE_DEVICES='0,1,-1,2,3'", "rocm", True),
        ("ROCR_VISIBLE_DEVICES='0,1,2,2'", "rocm", True),
        ("CUDA_VISIBLE_DEVICES='0'", "rocm", True),
        ("CUDA_VISIBLE_DEVICES='GPU-a, GPU-b, GPU-c'", "cuda", True),
        ("CUDA_VISIBLE_DEVICES='GPU-a, GPU-b, GPU-c, GPU-d'", "cuda", False),
        ("CUDA_VISIBLE_DEVICES='0,1,2,3,-1'", "cuda", False),
        ("HIP_VISIBLE_DEVICES='0'", "cuda", False),
        ("HIP_VISIBLE_DEVICES='${GPUS}'", "rocm", False),
        ("HIP_VISIBLE_DEVICES=''", "rocm", False),
    ],
)
def test_visible_gpus_are_counted(tmp_path: Path, value: str, platform: str, few: bool) -> None:
    text, facts = BASES["mi355x"]
    loaded = load(tmp_path, text, [f"engine.env.{value}", f"hardware={{platform: {platform}, gpus: 4}}"])
    assert ("VISIBLE_DEVICES_TOO_FEW" in [each.code for each in check(loaded, facts)]) is few


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("pipe", "circle", "."):
        with pytest.raises(FileError, match="cannot be written"):
            write_atomically(tmp_path / name, "new")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
