"""Spaces: conditions, what the preflight cuts, what is one engine twice, and what each point changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.errors import InputError
from dspark_deploy.profile.schema import SpaceSettings
from tests.support.stand_in import StandIn
from tests.support.sweeps import SWEEP, sweep
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load
from tuning.space import (
    REFERENCE,
    Configuration,
    choices,
    configurations,
    cut,
    fingerprint,
    from_params,
    schedule_choice,
)

K5 = Configuration(5, "greedy")


def labels(**space: Any) -> list[str]:
    return [each.label for each in configurations(SpaceSettings.model_validate(space))]


def test_the_reference_comes_first_and_nothing_comes_twice() -> None:
    assert labels(
        num_speculative_tokens=["none", 1, 3, 3], draft_sample_method=["greedy", "probabilistic"]
    ) == ["none", "k3-greedy", "k3-probabilistic", "k1-greedy", "k1-probabilistic"]
    assert labels(num_speculative_tokens=[1])[0] == "none", "accuracy needs it, asked for or not"


def test_without_speculation_nothing_is_chosen_for_drafts() -> None:
    found = labels(
        num_speculative_tokens=["none", 3],
        draft_sample_method=["greedy", "probabilistic"],
        rejection_sample_method=["standard", "block"],
        max_num_seqs=[8, 16],
    )
    assert found[:3] == ["none", "none-seqs8", "none-seqs16"]
    assert len(found) == 3 + 2 * 2 * 2


def test_params_come_back(tmp_path: Path) -> None:
    space = SpaceSettings.model_validate(
        {
            "num_speculative_tokens": [5],
            "verification": ["fixed", "adaptive", {"kind": "schedule", "per_batch_size": [[1, 8, 5]]}],
            "capture_sizes": ["rendered", 64, [6, 12]],
            "mhc_provider": ["torch"],
        }
    )
    for configuration in configurations(space):
        assert from_params(configuration.params()) == configuration
        assert "/" not in configuration.label and len(configuration.label) < 100


@pytest.mark.parametrize(
    ("others", "path", "value"),
    [
        ({"verification": "adaptive"}, ("speculative", "verification"), {"kind": "adaptive"}),
        (
            {"verification": schedule_choice([[1, 4, 5], [5, 64, 2]])},
            ("speculative", "verification"),
            {"kind": "schedule", "per_batch_size": [[1, 4, 5], [5, 64, 2]]},
        ),
        ({"rejection_sample_method": "block"}, ("speculative", "rejection_sample_method"), "block"),
        ({"dspark_draft_topk": 32}, ("speculative", "dspark_draft_topk"), 32),
        ({"dspark_draft_topk": "all"}, ("speculative", "dspark_draft_topk"), None),
        ({"max_num_seqs": 32}, ("engine", "args", "max-num-seqs"), 32),
        ({"max_num_batched_tokens": 512}, ("engine", "args", "max-num-batched-tokens"), 512),
        ({"capture_sizes": 64}, ("engine", "args", "max-cudagraph-capture-size"), 64),
        ({"capture_sizes": "[6, 12]"}, ("engine", "args", "cudagraph-capture-sizes"), [6, 12]),
        ({"capture_sizes": "rendered"}, ("engine", "args", "cudagraph-capture-sizes"), None),
        ({"mhc_provider": "torch"}, ("mhc", "provider"), "torch"),
    ],
)
def test_each_setting_reaches_its_place(
    tmp_path: Path, others: dict[str, Any], path: tuple[str, ...], value: Any
) -> None:
    revised = from_params(K5.params() | others).apply(load(tmp_path))
    found: Any = revised.values
    for key in path:
        found = found[key]
    assert found == value
    assert revised.profile.engine.port == 0


def test_what_the_preflight_refuses_is_cut_with_its_codes(tmp_path: Path) -> None:
    space = SpaceSettings.model_validate(
        {
            "num_speculative_tokens": ["none", 3, 5],
            "verification": ["fixed", "adaptive", {"kind": "schedule", "per_batch_size": [[1, 8, 5]]}],
            "dspark_draft_topk": ["all", 8],
        }
    )
    facts = good_facts(features={"adaptive_verification": True, "draft_topk": False})
    found = cut(space, load(tmp_path), facts)
    by_label = {configuration.label: each.codes for configuration, each in found.infeasible.items()}
    assert by_label["k5-greedy-adaptive-topkall"] == ("ADAPTIVE_NEEDS_GRAPHS",)
    assert by_label["k5-greedy-adaptive-topk8"] == ("DRAFT_TOPK_UNKNOWN_FIELD", "ADAPTIVE_NEEDS_GRAPHS")
    assert by_label["k3-greedy-schedule-1to8k5-topkall"] == ("NOT_A_PROFILE",)
    kept = [cell.label for cell in found.cells]
    assert kept == [
        "none",
        "k5-greedy-fixed-topkall",
        "k5-greedy-schedule-1to8k5-topkall",
        "k3-greedy-fixed-topkall",
    ]


def test_a_schedule_below_k_is_another_ks(tmp_path: Path) -> None:
    space = SpaceSettings.model_validate(
        {"num_speculative_tokens": [5], "verification": [{"kind": "schedule", "per_batch_size": [[1, 8, 3]]}]}
    )
    found = cut(space, load(tmp_path), good_facts())
    assert [each.codes for each in found.infeasible.values()] == [("SCHEDULE_NOT_FOR_THIS_K",)]


def test_one_engine_is_measured_once(tmp_path: Path) -> None:
    loaded = load(tmp_path, sets=["engine.args.max-num-seqs=16"])
    space = SpaceSettings.model_validate({"num_speculative_tokens": ["none", 5], "max_num_seqs": [8, 16]})
    found = cut(space, loaded, good_facts())
    assert [cell.label for cell in found.cells] == [
        "none",
        "none-seqs8",
        "k5-greedy-seqs8",
        "k5-greedy-seqs16",
    ]
    assert {a.label: b for a, b in found.same.items()} == {"none-seqs16": REFERENCE}


def test_a_space_beyond_listing_is_refused() -> None:
    space = SpaceSettings(max_num_seqs=list(range(1, 150)), max_num_batched_tokens=list(range(1, 150)))
    with pytest.raises(InputError, match=r"points; above 10000"):
        configurations(space)


def test_choices_are_what_optuna_can_store() -> None:
    space = SpaceSettings.model_validate({"capture_sizes": [[6, 12], 64], "verification": ["schedule"]})
    found = choices(space)
    assert found["capture_sizes"] == ["[6, 12]", 64] and found["verification"] == ["schedule"]
    assert found["num_speculative_tokens"] == [0, 7, 5, 3, 2, 1]


def test_infeasible_points_are_never_booted_and_stand_in_the_result(tmp_path: Path) -> None:
    text = SWEEP.replace("[none, 1, 3, 5]", "[none, 5]\n    verification: [fixed, adaptive]")
    done = sweep(tmp_path, StandIn(), text)
    assert done.engine.launched == ["none", "k5-greedy-fixed"]
    cells = {cell["configuration"]: cell for cell in done.result["cells"]}
    assert cells["k5-greedy-adaptive"]["state"] == "infeasible"
    assert cells["k5-greedy-adaptive"]["codes"] == ["ADAPTIVE_NEEDS_GRAPHS"]
    assert "k5-greedy-adaptive: infeasible, never booted: ADAPTIVE_NEEDS_GRAPHS" in done.text
    trials = done.campaign.study.study.get_trials()
    assert [trial.user_attrs.get("codes") for trial in trials if trial.values is None] == [
        ["ADAPTIVE_NEEDS_GRAPHS"]
    ]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("verification: [sometimes]", "verification"),
        ("verification: [{kind: schedule, per_batch_size: [[2, 8, 3]]}]", "start at batch size 1"),
        ("max_num_seqs: [0]", "greater than or equal to 1"),
        ("dspark_draft_topk: [none]", "dspark_draft_topk"),
        ("mhc_provider: [cuda]", "'auto', 'aiter', 'tilelang' or 'torch'"),
        ("capture_sizes: [wide]", "capture_sizes"),
        ("max_seqs: [1]", "did you mean 'max_num_seqs'"),
    ],
)
def test_faults_in_a_space_have_their_line(tmp_path: Path, space: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, TEXT + f"sweep:\n  space:\n    {space}\n")
    assert "test.yaml:12" in str(caught.value)


def test_fingerprint_ignores_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
