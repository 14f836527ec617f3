"""Verdicts on acceptance, synthetic acceptance kept to its place, and `dspark-tune acceptance`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dspark_deploy.errors import InputError, PreflightRefused
from dspark_deploy.preflight.synthetic import config_of_flags, synthetic_faults
from dspark_deploy.serve import app as serve_app
from tests.support.cli import Tune
from tests.support.shared import case, case_json
from tests.support.simulated_engine import SimulatedEngine
from tests.unit.facts import good_facts
from tests.unit.profiles import load
from tests.unit.test_acceptance import AFTER, BEFORE, fresh, page
from tuning.acceptance import conditional
from tuning.acceptance_log import read_line, read_log
from tuning.measurement import Plan, measure
from tuning.verdicts import judge_acceptance
from tuning.workload import TinyArithmetic

LINE = (
    "INFO 12-01 10:00:00 [metrics.py:1] SpecDecoding metrics: Mean acceptance length: {length:.2f}, Accepted "
    "throughput: 1.00 tokens/s, Drafted throughput: 2.00 tokens/s, Accepted: {accepted} tokens, Drafted: "
    "{drafted} tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate: 9.0%\n"
)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return Tune(monkeypatch, capsys)


def names(rates: list[float], **options: object) -> list[str]:
    return [verdict.name for verdict in judge_acceptance(rates, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.83, 0.62, 0.45, 0.33, 0.25], []),
        ([0.17, 0.06, 0.03, 0.012, 0.008, 0.0, 0.0], ["past-the-block", "low"]),
        ([0.42, 0.025, 0.004, 0.001, 0.0], ["chain-dead-after-1", "low"]),
        ([0.8, 0.6, 0.05, 0.01, 0.0], ["chain-dead-after-2"]),
        ([0.995, 0.992, 0.990, 0.988, 0.985], ["too-good"]),
        ([0.5, 0.6, 0.0, 0.0, 0.0], ["not-monotone"]),
        ([0.6], []),
        ([0.1], ["low"]),
        ([], []),
    ],
)
def test_patterns_of_public_reports(rates: list[float], expected: list[str]) -> None:
    assert names(rates) == expected


def test_case_14_log_lines() -> None:
    wanted = [["past-the-block", "low"], ["chain-dead-after-1", "low"], [], ["too-good"], ["not-monotone"]]
    rows = case_json("14-acceptance-lines.json")
    assert len(rows) == len(wanted)
    for row, expected in zip(rows, wanted, strict=True):
        found = read_line(row["line"])
        assert found is not None and len(found.per_position) == row["k"]
        assert found.length == pytest.approx(row["AL"], abs=0.006)
        assert 1 + sum(found.position_rates) == pytest.approx(row["one_plus_sum"], abs=0.006)
        assert names(found.position_rates) == expected, row["verdict"]
        assert row["verdict"].startswith("pass") == (not expected)


def test_a_known_block_and_a_known_range_sharpen_the_verdict() -> None:
    rates = [0.8, 0.6, 0.45, 0.35, 0.28, 0.0]
    assert names(rates) == ["chain-dead-after-5"], "without the block it can't be known why"
    assert names(rates, block=5) == ["past-the-block"]
    (verdict,) = judge_acceptance(rates, block=5)
    assert "to 5" in verdict.remedy
    assert names([0.83, 0.62, 0.45, 0.33, 0.25], expected=(3.6, 3.9)) == ["low"]
    assert names([0.83, 0.62, 0.45, 0.33, 0.25], expected=(2.0, 3.0)) == ["above-expected"]


def test_under_adaptive_verification_only_the_length_is_judged() -> None:
    assert names([0.42, 0.025, 0.004, 0.001, 0.0], fixed_k=False) == ["low"]
    assert names([0.5, 0.6, 0.4], fixed_k=False) == []


@given(st.lists(st.floats(0.3, 0.9), min_size=2, max_size=8))
def test_healthy_chains_are_never_called_dead_or_impossible(chances: list[float]) -> None:
    rates, reached = [], 1.0
    for chance in chances:
        reached *= chance
        rates.append(reached)
    assert set(names(rates)) <= {"low", "too-good"}
    assert conditional(rates) == pytest.approx(chances)


def test_logs_are_pooled_by_their_drafts(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    one = LINE.format(length=1.5, accepted=100, drafted=400, rates="0.400, 0.100")
    two = LINE.format(length=2.5, accepted=900, drafted=1200, rates="0.900, 0.600")
    log.write_text(f"a line\n{one}noise\n{two}")
    found = read_log(log)
    assert (found.drafts, found.accepted) == (800, 1000)
    assert found.length == pytest.approx(2.25)
    log.write_text(one + two.replace("0.900, 0.600", "0.900, 0.600, 0.1"))
    with pytest.raises(InputError, match="k = 2, 3"):
        read_log(log)
    log.write_text("nothing")
    with pytest.raises(InputError, match="SpecDecoding metrics"):
        read_log(log)


def write_pages(folder: Path, before: str, after: str) -> list[str]:
    (folder / "before.prom").write_text(before)
    (folder / "after.prom").write_text(after)
    return ["--before", str(folder / "before.prom"), "--after", str(folder / "after.prom")]


def test_the_command_on_case_05(tune: Tune) -> None:
    expected = case_json("05-metrics-dp2-expected.json")
    done = tune(
        "acceptance",
        *("--before", case("05-metrics-dp2-before.prom"), "--after", case("05-metrics-dp2-after.prom")),
    )
    result = done.document["result"]
    assert done.code == 0 and (result["drafts"], result["accepted"]) == (2000, 3900)
    assert result["acceptance_length"] == pytest.approx(expected["AL"])
    assert result["draft_acceptance_rate"] == pytest.approx(expected["draft_accept_rate"])
    assert result["per_position"] == pytest.approx(expected["per_pos"])
    assert (abs(result["identity_gap"]) < 1e-9) is expected["identity_holds"]
    assert result["engines"] == 2 and done.document["formulas"] == 1


def test_a_bad_chain_is_exit_code_7_with_the_whole_record(tune: Tune, tmp_path: Path) -> None:
    after = page([(1000, [420, 25, 4, 1, 0])])
    done = tune("acceptance", *write_pages(tmp_path, fresh(1, 5), after), "--out", tmp_path / "record.json")
    assert done.code == done.document["exit_code"] == 7
    assert [v["name"] for v in done.document["result"]["verdicts"]] == ["chain-dead-after-1", "low"]
    assert "Markov head" in done.stderr and (tmp_path / "record.json").exists()


@pytest.mark.parametrize(("block", "k", "notes"), [(2, 5, 1), (5, 5, 0), (7, 5, 0)])
def test_drafts_past_the_block_that_are_accepted_are_a_note(
    tune: Tune, tmp_path: Path, block: int, k: int, notes: int
) -> None:
    after = page([(1000, [800, 700, 600, 500, 400][:k])])
    done = tune("acceptance", *write_pages(tmp_path, fresh(1, k), after), "--block", block)
    assert done.code == 0 and len(done.document["result"]["notes"]) == notes
    assert ("k = 5 lies past the trained block of 2" in done.stderr) is bool(notes)


def test_a_restarted_engine_between_the_scrapes(tune: Tune, tmp_path: Path) -> None:
    done = tune("acceptance", *write_pages(tmp_path, page(AFTER), page(BEFORE)))
    assert done.code == 1 and "restarted" in done.document["error"]
    reborn = page(AFTER).replace("1.78e+09", "1.79e+09")  # it has passed its earlier count again
    done = tune("acceptance", *write_pages(tmp_path, page(BEFORE), reborn))
    assert done.code == 1 and "restarted between the scrapes" in done.document["error"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name one source"),
        (["--before", "a"], "name one source"),
        (["--log", "nowhere.log"], "can't be read"),
        (["--log", "x", "--machine", "CPU engine"], "--url"),
        (["--before", "nowhere", "--after", "nowhere"], "curl"),
        (["--log", "x", "--expect", "4,3"], "lower number"),
        (["--log", "x", "--expect", "much"], "3.4,3.7"),
        (["--url", "http://127.0.0.1:9", "--seconds", "0"], "/v1/models"),
    ],
)
def test_bad_input_says_what_to_do(tune: Tune, arguments: list[str], says: str) -> None:
    done = tune("acceptance", *arguments)
    assert done.code == 2 and says in done.document["error"] and "Traceback" not in done.stderr


def test_pages_without_drafts(tune: Tune, tmp_path: Path) -> None:
    done = tune("acceptance", *write_pages(tmp_path, page(AFTER), page(AFTER)))
    assert done.code == 1 and "was there traffic" in done.document["error"]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("text", ["", "<html>502</html>", page(AFTER).replace("1020.0", "NaN")])
def test_a_damaged_page_is_named_and_bad_input(tune: Tune, tmp_path: Path, which: int, text: str) -> None:
    pages = [page(BEFORE), page(AFTER)]
    pages[which] = text
    done = tune("acceptance", *write_pages(tmp_path, *pages))
    name = ("before.prom", "after.prom")[which]
    assert done.code == 2 and f"{name}: " in done.document["error"], done.document


def test_an_engine_that_joined_names_both_pages(tune: Tune, tmp_path: Path) -> None:
    done = tune("acceptance", *write_pages(tmp_path, page(BEFORE[:1]), page(AFTER)))
    assert done.code == 1 and 'engine="1"' in done.document["error"]
    assert "before.prom and " in done.document["error"] and "joined" in done.document["error"]


def test_past_end_share_in_the_command(tune: Tune, tmp_path: Path) -> None:
    engine = SimulatedEngine((0.9, 0.9))
    before = engine.page()
    engine.bench(100, 4, tokens=7)
    done = tune("acceptance", *write_pages(tmp_path, before, engine.page()))
    assert 0 < done.document["result"]["past_end_share"] < 0.5


SYNTHETIC = {"num_speculative_tokens": 5, "rejection_sample_method": "synthetic"}


def codes(task: str, measured_k: int | None = None, **changes: object) -> list[str]:
    found = synthetic_faults({**SYNTHETIC, **changes}, task, measured_k)  # type: ignore[arg-type]
    return [fault.code for fault in found]


def test_case_10_synthetic_acceptance() -> None:
    tasks = {"gsm8k": "accuracy", "serve": "serve", "bench": "bench"}
    for row in case_json("10-synthetic-acceptance.json")["rows"]:
        found = [fault.code for fault in synthetic_faults(row["spec"], tasks[row["task"]])]  # type: ignore[arg-type]
        expected = row["expect"]
        assert found == ([expected.split()[1]] if expected.startswith("error") else []), row


def test_synthetic_acceptance_after_the_dashes_is_found() -> None:
    spelled = json.dumps(SYNTHETIC)
    for flags in (["--speculative-config", spelled], [f"--speculative_config={spelled}"], ["-sc", spelled]):
        assert config_of_flags(flags) == SYNTHETIC
    dotted = ["--seed", "1", "--speculative-config.rejection_sample_method", "synthetic"]
    assert config_of_flags(dotted) == {"rejection_sample_method": "synthetic"}
    assert config_of_flags(["--speculative-config", "no JSON", "--speculative-config"]) == {}
    serve = CliRunner().invoke(serve_app, ["--profile", "cpu-tiny.yaml", "--dry-run", "--", *dotted])
    assert isinstance(serve.exception, PreflightRefused)
    assert "SYNTHETIC_IN_SERVING" in str(serve.exception.document)


def test_synthetic_acceptance_never_reaches_accuracy(tmp_path: Path) -> None:
    plan = Plan([1], 1, 8, 0.0, accuracy_problems=1)
    flags = ["--speculative-config", json.dumps(SYNTHETIC)]
    with pytest.raises(InputError, match="SYNTHETIC_IN_ACCURACY"):
        measure(load(tmp_path), good_facts(), plan, TinyArithmetic(), tmp_path, print, flags)


def test_forced_lengths_belong_to_their_k() -> None:
    assert codes("bench", synthetic_acceptance_length=3.2, measured_k=5) == []
    assert codes("bench", synthetic_acceptance_length=3.2, measured_k=7) == ["SYNTHETIC_AL_NOT_FOR_THIS_K"]
    assert codes("bench", synthetic_acceptance_rates=[0.5] * 4) == ["SYNTHETIC_AL_NOT_FOR_THIS_K"]
    assert codes("serve", rejection_sample_method="block") == []
