"""Flags after `--` in every spelling of vLLM's parser, and every rule that looks at them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dspark_deploy.launch import command as rendering
from dspark_deploy.launch.nodes import is_headless
from dspark_deploy.preflight import check
from dspark_deploy.preflight.vllm_build import vllm_folder
from dspark_deploy.profile.flags import SHORT, parse_flags
from dspark_deploy.profile.schema import ArgValue
from tests.unit.facts import good_facts
from tests.unit.findings import BASES, after, findings
from tests.unit.profiles import load

WAYS: list[tuple[list[str], dict[str, ArgValue]]] = [
    (["--max-num-seqs", "8"], {"max-num-seqs": 8}),
    (["--max_num_seqs=8"], {"max-num-seqs": 8}),
    (["--max-num-seqs", "8", "--max-num-seqs", "9"], {"max-num-seqs": 9}),
    (["--enforce-eager"], {"enforce-eager": True}),
    (["--enforce-eager", "--no-enforce_eager"], {"enforce-eager": False}),
    (["-tp", "8", "-pp=2", "-n2"], {"tensor-parallel-size": 8, "pipeline-parallel-size": 2, "nnodes": 2}),
    (["-ep", "-dp", "2"], {"enable-expert-parallel": True, "data-parallel-size": 2}),
    (["-O3"], {"optimization-level": 3}),
    (["-O=2"], {"optimization-level": 2}),
    (["-O", "1"], {"optimization-level": 1}),
    (["-q", "fp8"], {"quantization": "fp8"}),
    (["--max-model-len", "-1"], {"max-model-len": -1}),
    (["--gpu-memory-utilization", ".5"], {"gpu-memory-utilization": 0.5}),
    (["--max-model-len", "25.6k"], {"max-model-len": "25.6k"}),
    (["--cudagraph-capture-sizes", "6", "12"], {"cudagraph-capture-sizes": [6, 12]}),
    (["-cc", '{"mode": 3}'], {"compilation-config": {"mode": 3}}),
    (["-cc.mode", "3", "-cc.a_b.c=x"], {"compilation-config": {"mode": 3, "a_b": {"c": "x"}}}),
    (["--compilation_config.sizes+", "1,2"], {"compilation-config": {"sizes": ["1", "2"]}}),
    (["-cc", '{"a": 1}', "--compilation-config.mode", "3"], {"compilation-config": {"mode": 3}}),
    (["--compilation-config.on", "true"], {"compilation-config": {"on": True}}),
    (["--kv-transfer-config", "{broken"], {"kv-transfer-config": "{broken"}),
]


@pytest.mark.parametrize(("parts", "args"), WAYS)
def test_every_spelling_comes_to_the_same_form(parts: list[str], args: dict[str, ArgValue]) -> None:
    found = parse_flags(parts)
    assert found.args == args and type(next(iter(found.args.values()))) is type(next(iter(args.values())))
    assert found.unread == ()


@pytest.mark.parametrize(
    ("parts", "unread"),
    [
        (["model", "--seed", "1"], ("model",)),
        (["--no-enforce-eager", "true"], ("true",)),
        (["--seed", "1", "--"], ("--",)),
        (["--cc.mode", "1", "2"], ("2",)),
    ],
)
def test_what_belongs_to_no_flag_is_kept(parts: list[str], unread: tuple[str, ...]) -> None:
    assert parse_flags(parts).unread == unread


def test_the_short_names_are_those_of_the_installed_vllm() -> None:
    folder = vllm_folder()
    assert folder is not None
    sources = [folder / "engine/arg_utils.py", folder / "entrypoints/launchers/cli_args.py"]
    pattern = re.compile(r'add_argument\(\s*"--([a-z0-9-]+)",\s*"-([A-Za-z]+)"')
    found = {short: name for path in sources for name, short in pattern.findall(path.read_text())}
    assert len(found) > 10
    assert {short: SHORT.get(short) for short in found} == found


# What a rule says of engine.args it says of the same flag after --.
@pytest.mark.parametrize(
    ("parts", "code"),
    [
        (["--gpu-memory-utilization", "1.5"], "VALUE_IMPOSSIBLE"),
        (["--max-num-seqs", "10000000"], "VALUE_IMPOSSIBLE"),
        (["-tp", "8"], "GPUS_TOO_FEW"),
        (["--trust-remote-code"], "TRUST_REMOTE_CODE"),
        (["--enable_prefix_caching"], "PREFIX_CACHE_UNUSED"),
        (["-cc.cudagraph_mode", "full_decode_only"], "DECODE_ONLY_GRAPHS_V4"),
        (["--max-cudagraph-capture-size", "64"], "CAPTURE_SIZE_TOO_SMALL"),
        (["--dtype", "float16"], "MHC_DTYPE"),
        (["--config=flags.yaml"], "FLAGS_IN_FILE"),
        (["--port", "9"], "FLAG_OWNED"),
        (["--uds", "/tmp/socket"], "FLAG_OWNED"),
        (["--spec-tokens", "7"], "FLAG_OWNED"),
        (["--speculative-conf", "{}"], "FLAG_OWNED"),
        (["-tpx", "8"], "FLAG_UNREAD"),
        (["--no-max-num-seqs"], "FLAG_OVERRIDDEN"),
        (["--override-generation-config", '{"note": "api_key=s3cret"}'], "SECRET_IN_COMMAND"),
    ],
)
def test_rules_see_flags_after_the_dashes(tmp_path: Path, parts: list[str], code: str) -> None:
    found = [each for each in findings("mi355x", after(*parts), tmp_path) if each.code == code]
    assert found and found[0].where == "after --" and "engine.args." not in found[0].message.partition(" ")[0]


def test_the_later_wins_for_every_rule(tmp_path: Path) -> None:
    text, facts = BASES["mi355x"]
    loaded = load(
        tmp_path, text, ["engine.args.enforce-eager=true", "speculative.verification={kind: adaptive}"]
    )
    assert "ADAPTIVE_NEEDS_GRAPHS" in [each.code for each in check(loaded, facts)]
    assert [each.code for each in check(loaded, facts, ["--no-enforce-eager"])] == ["FLAG_OVERRIDDEN"]


def test_a_key_behind_a_dot_in_the_profile_is_inside_its_flag(tmp_path: Path) -> None:
    text, facts = BASES["mi355x"]
    loaded = load(tmp_path, text, ["engine.args={compilation-config.cudagraph_mode: FULL_DECODE_ONLY}"])
    assert [each.code for each in check(loaded, facts)] == ["DECODE_ONLY_GRAPHS_V4"]


def test_capture_sizes_and_headless_follow_the_flags(tmp_path: Path) -> None:
    loaded = load(tmp_path, BASES["mi355x"][0])
    facts = good_facts(versions={"vllm": "0.33.0"})
    command = rendering.serve_command(loaded.profile, facts, 1, ["--max_num_seqs", "2"])
    at = command.index("--cudagraph-capture-sizes")
    assert command[at + 1 : at + 4] == ["6", "12", "--max_num_seqs"]
    assert "--cudagraph-capture-sizes" not in rendering.serve_command(
        loaded.profile, facts, 1, ["--enforce-eager"]
    )
    assert is_headless(loaded.profile, ["--headless"]) and not is_headless(loaded.profile, ["--no-headless"])
