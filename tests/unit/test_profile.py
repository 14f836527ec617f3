"""Profiles: every fault is found at once, with its line and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dspark_deploy.errors import InputError
from dspark_deploy.profile import load_profile
from dspark_deploy.profile.loading import find_profile
from tests.unit.profiles import TEXT, load, write


def faults(folder: Path, text: str, sets: list[str] | None = None) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(folder, text, sets)
    return caught.value.faults


def test_every_shipped_profile_loads() -> None:
    shipped = find_profile("cpu-tiny.yaml").parent
    names = [path.name for path in shipped.glob("*.yaml")]
    assert "cpu-tiny.yaml" in names
    for name in names:
        load_profile(name)


def test_all_faults_at_once_with_line_and_remedy(tmp_path: Path) -> None:
    text = TEXT.replace("platform: cpu", "platform: amd").replace(
        "num_speculative_tokens: 5", 'num_speculative_tokens: "5"'
    )
    text += "  draft_sample_methd: greedy\n"
    found = faults(tmp_path, text)
    assert len(found) == 3
    assert found[0].startswith("test.yaml:3: hardware.platform: ") and "'rocm'" in found[0]
    assert found[1].startswith("test.yaml:9: speculative.num_speculative_tokens: ") and "'5'" in found[1]
    assert found[2] == (
        "test.yaml:10: speculative.draft_sample_methd: unknown key; did you mean 'draft_sample_method'?"
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: test", "name: test\nname: twice", "test.yaml:2: name: given twice"),
        ("name: test", "name: &a test", "test.yaml:1: anchors"),
        ("name: test", "name: [1", "not YAML"),
        ("name: test", "name: !!python/object:os.system x", "tags (!) are not read"),
        ("  port: 8123", "  port: 99999", "test.yaml:6: engine.port: "),
        ("  port: 8123", "  args: {port: 1}", "engine.args: 'port' is set by engine.port"),
        ("  port: 8123", "  args: {--max-num-seqs: 1}", "write '--max-num-seqs' as 'max-num-seqs'"),
        ("  port: 8123", "  args: {max-num-seqs: 10000000000}", "the most is 65536"),
        ("  port: 8123", "  vllm: newest", "test.yaml:6: engine.vllm: given twice"),
        ('">=0.26"', "newest", "'newest' is not a version range"),
        ("num_speculative_tokens: 5", "num_speculative_tokens: 0", "greater than or equal to 1"),
        ("model: {path: /models/target}", "", "model: is required and missing"),
        ("  port: 8123", "  env: {'A=B': x}", "'A=B' is no name of an environment variable"),
        ("  port: 8123", '  host: "x\\0"', "test.yaml:6: a NUL character"),
        ("name: test", "name: " + "[" * 5000, "nested too deeply"),
        ("name: test", "name: 0x" + "f" * 5000, "test.yaml:1: name: an integer of more than 64 bits"),
        ("name: test", "name: test\nexpect: [{workload: x, accuracy: [0, 0x" + "f" * 400 + "]}]", "64 bits"),
        ("name: test", "name: test\nsweep: {temperature: .inf}", "sweep.temperature"),
        ("name: test", "name: test\nexpect: [{workload: x, accuracy: [0.9, 0.1]}]", "from the lower number"),
        (
            "num_speculative_tokens: 5",
            "num_speculative_tokens: 5\n  verification: {kind: schedule, per_batch_size: [[1, 4, 15]]}",
            "asks for 15 tokens, above num_speculative_tokens: 5",
        ),
        ("hardware: {platform: cpu}", "hardware: {1: cpu}", "key '1' is not text"),
        (
            "num_speculative_tokens: 5",
            "num_speculative_tokens: 5\n"
            "  verification: {kind: schedule, per_batch_size: [[5, 8, 2], [1, 4, 5]]}",
            "row [1, 4, 5] is out of order",
        ),
    ],
)
def test_a_fault_says_where_and_what(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in TEXT
    assert expected in "\n".join(faults(tmp_path, TEXT.replace(old, new)))


def test_extends_merges_and_keeps_places(tmp_path: Path) -> None:
    write(tmp_path, TEXT, "base.yaml")
    child = "extends: base.yaml\nname: child\nspeculative: {num_speculative_tokens: 3}\n"
    loaded = load(tmp_path, child)
    assert loaded.profile.name == "child"
    assert loaded.profile.speculative is not None
    assert loaded.profile.speculative.draft == "/models/draft"
    assert loaded.profile.speculative.num_speculative_tokens == 3
    assert loaded.where("speculative", "draft") == "base.yaml:8"
    assert loaded.where("speculative", "num_speculative_tokens") == "test.yaml:3"


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    with pytest.raises(InputError, match="circle"):
        load_profile(tmp_path / "a.yaml")


def test_set_overrides_and_is_named_in_faults(tmp_path: Path) -> None:
    loaded = load(tmp_path, sets=["speculative.num_speculative_tokens=3", "engine.args={max-num-seqs: 4}"])
    assert loaded.profile.speculative is not None
    assert loaded.profile.speculative.num_speculative_tokens == 3
    assert loaded.profile.engine.args == {"max-num-seqs": 4}
    found = faults(tmp_path, TEXT, ["speculative.num_speculative_tokens=many"])
    assert found[0].startswith("--set speculative.num_speculative_tokens: ")
    assert "write path=value" in faults(tmp_path, TEXT, ["nonsense"])[0]


def test_a_rejected_secret_is_not_repeated(tmp_path: Path) -> None:
    for assignment in ("engine.env.FOO=[s3cret]", "engine.args.api-key=[[s3cret]]"):
        assert "s3cret" not in "\n".join(faults(tmp_path, TEXT, [assignment]))


def test_one_fault_for_one_mistake_in_a_union(tmp_path: Path) -> None:
    assert len(faults(tmp_path, TEXT, ["engine.args.x=[[1]]"])) == 1


def test_given_values_are_taken_as_they_are(tmp_path: Path) -> None:
    loaded = load_profile(write(tmp_path), given={"model.path": "C#x #y: 123"})
    assert loaded.profile.model.path == "C#x #y: 123"


def test_revised_changes_a_copy(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    revised = loaded.revised({"speculative": None, "engine.port": 0})
    assert revised.profile.speculative is None and revised.profile.engine.port == 0
    assert loaded.profile.speculative is not None and loaded.profile.engine.port == 8123


def test_unknown_profile_lists_the_shipped_ones() -> None:
    with pytest.raises(InputError, match=r"cpu-tiny\.yaml"):
        find_profile("no-such.yaml")


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
SECTIONS = ("name", "model", "hardware", "engine", "speculative", "expect", "sweep", "extends")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SECTIONS), YAML_VALUES)
@example("extends", {"a": 1})
@example("speculative", {"num_speculative_tokens": 5, "verification": "fixed"})
@example("expect", [{"workload": "x", "accuracy": [0.1]}])
def test_no_value_anywhere_gives_a_traceback(tmp_path: Path, section: str, value: object) -> None:
    document = yaml.safe_load(TEXT) | {section: value}
    try:
        load(tmp_path, yaml.safe_dump(document, allow_unicode=True))
    except InputError as error:
        assert all(fault.strip() for fault in error.faults)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_no_bytes_give_a_traceback(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "raw.yaml"
    path.write_bytes(raw)
    with pytest.raises(InputError):
        load_profile(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(TEXT)), st.text(max_size=6))
def test_no_insertion_gives_a_traceback(tmp_path: Path, position: int, text: str) -> None:
    try:
        load(tmp_path, TEXT[:position] + text + TEXT[position:])
    except InputError as error:
        assert error.faults


@pytest.mark.parametrize("path", ["mhc.gate", "jit.guard"])
def test_off_needs_no_quotes(tmp_path: Path, path: str) -> None:
    section, name = path.split(".")
    for text in (TEXT + f"{section}: {{{name}: off}}\n", TEXT + f'{section}: {{{name}: "off"}}\n'):
        assert getattr(getattr(load(tmp_path, text).profile, section), name) == "off"
    assert getattr(getattr(load(tmp_path, TEXT, [f"{path}=off"]).profile, section), name) == "off"
    with pytest.raises(InputError, match="Input should be"):
        load(tmp_path, TEXT, [f"{path}=on"])
