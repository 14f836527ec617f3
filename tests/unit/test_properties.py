"""Properties of what reads profiles, facts and other files from outside: what is written is read back, a
misspelt key is refused where it stands, and no damage gives another error than ours.

In brief what `bench/fuzz.py` does a million times; the examples are the same in each run.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fuzz import Failures, draw_inputs
from bench.fuzzing import targets as fuzzed
from bench.fuzzing.mutation import misspelt, mutate
from dspark_deploy.errors import InputError
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile, load_profile
from tests.unit.facts import good_facts
from tests.unit.profiles import load
from tuning.best import write_best
from tuning.space import Configuration, from_params

SEEDS = st.integers(0, 2**32).map(random.Random)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False, allow_subnormal=False), WORDS
)
FLAGS = st.from_regex(r"x-[a-z]{1,8}", fullmatch=True)
K = st.integers(1, 8)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Profiles that are right."""
    k = draw(K)
    verification = st.sampled_from([{"kind": "fixed"}, {"kind": "schedule", "per_batch_size": [[1, 64, k]]}])
    return {
        "name": draw(st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True)),
        "description": draw(WORDS),
        "model": {"path": draw(st.from_regex(r"/[a-z]{1,8}(/[\w .-]{1,8})?", fullmatch=True))},
        "hardware": {"platform": draw(st.sampled_from(["cpu", "cuda", "rocm"]))},
        "engine": {
            "vllm": draw(st.sampled_from([">=0.26", ">=0.26,<0.40", "==0.32.*"])),
            "port": draw(st.integers(0, 65535)),
            "args": draw(st.dictionaries(FLAGS, SCALARS, max_size=3)),
            "env": draw(st.dictionaries(st.from_regex(r"[A-Z]{1,8}", fullmatch=True), WORDS, max_size=3)),
        },
        "speculative": {
            "draft": "/models/draft",
            "num_speculative_tokens": k,
            "verification": draw(verification),
        },
        "expect": [
            {
                "workload": "x",
                "accuracy": sorted(draw(st.tuples(*[st.floats(0, 1, allow_subnormal=False)] * 2))),
            }
        ],
    }


def written(document: dict[str, Any]) -> LoadedProfile:
    """The profile, through a file."""
    with tempfile.TemporaryDirectory() as folder:
        return load(Path(folder), yaml.safe_dump(document, allow_unicode=True))


@given(documents())
def test_a_profile_says_what_was_written(document: dict[str, Any]) -> None:
    profile = written(document).profile
    assert profile.engine.args == document["engine"]["args"]
    assert profile.engine.env == document["engine"]["env"]
    assert profile.description == document["description"]
    assert (
        profile.speculative is not None
        and profile.speculative.num_speculative_tokens == (document["speculative"]["num_speculative_tokens"])
    )


@given(documents())
def test_a_resolved_profile_is_a_profile(document: dict[str, Any]) -> None:
    """`profile.yaml` of a run directory, loaded again, is the same."""
    profile = written(document).profile
    assert written(profile.model_dump(mode="json")).profile == profile


@settings(max_examples=30)
@given(documents(), K, st.sampled_from(["greedy", "probabilistic"]), st.integers(1, 512))
def test_a_best_profile_is_the_configuration(document: dict[str, Any], k: int, how: str, seqs: int) -> None:
    document["speculative"].pop("verification")
    best = from_params({"num_speculative_tokens": k, "draft_sample_method": how, "max_num_seqs": seqs})
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(Path(folder), yaml.safe_dump(document, allow_unicode=True))
        write_best(loaded, best, ["from a test"], Path(folder) / "best.yaml")
        again = load_profile(Path(folder) / "best.yaml").profile
        assert again == loaded.revised(best.changes()).profile
        write_best(loaded, Configuration(0), [], Path(folder) / "none.yaml")
        assert load_profile(Path(folder) / "none.yaml").profile.speculative is None


@given(SEEDS)
def test_a_misspelt_key_is_refused_where_it_stands(chance: random.Random) -> None:
    document = yaml.safe_load(fuzzed.SAMPLE)
    wrong = misspelt(document, fuzzed.FREE, chance)
    text = yaml.safe_dump(document)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(InputError) as caught:
        load(Path(folder), text)
    # Without its kind, nobody knows which keys a verification has: that fault is its section's.
    known = f"{wrong}:", "verification:"
    lines = [
        f"test.yaml:{n}:" for n, line in enumerate(text.splitlines(), 1) if line.strip(" -").startswith(known)
    ]
    assert any(wrong in fault and fault.startswith(tuple(lines)) for fault in caught.value.faults)


@given(SEEDS)
def test_a_misspelt_fact_is_refused(chance: random.Random) -> None:
    document = good_facts().as_json()
    wrong = misspelt(document, fuzzed.FREE_FACTS, chance)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(InputError) as caught:
        path = Path(folder) / "facts.json"
        path.write_text(json.dumps(document))
        Facts.from_file(path)
    assert wrong in str(caught.value)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fuzzed.Target]:
    return {each.name: each for each in fuzzed.targets(tmp_path_factory.mktemp("fuzz"))}


@settings(max_examples=600)
@given(number=st.integers(0, 10**6), chance=SEEDS)
def test_no_damage_gives_another_error_than_ours(
    readers: dict[str, fuzzed.Target], number: int, chance: random.Random
) -> None:
    target = list(readers.values())[number % len(readers)]
    target.attempt(mutate(target.seeds, chance), refuse=False)


def test_the_fuzzer_finds_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a hang and a misspelt key that is taken: each is counted once a kind, its input kept."""
    monkeypatch.setattr("bench.fuzz.LIMIT_S", 0.05)

    def read(data: bytes) -> None:
        while data == b"hang":
            pass
        if data == b"broken":
            raise KeyError("broken")

    found = Failures(tmp_path)
    target = fuzzed.Target("reader", [b"hang", b"broken", b"broken"], read, lambda _: b"typo")
    counted = draw_inputs(target, 40, 1, found)
    assert counted["inputs"] == 40 and counted["failures"] == found.count >= 3
    kinds = {kind.partition(" at ")[0] for kind in found.kinds}
    assert kinds == {"reader: Hang", "reader: KeyError", "reader: AcceptedTypo"}
    assert {path.read_bytes() for path in tmp_path.glob("*.input")} == {b"hang", b"broken", b"typo"}
