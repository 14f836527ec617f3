"""Numbers that a person gives: nan, inf, negative, nought and huge are refused before an engine boots."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import annotated_types
import pytest
import typer

from dspark_deploy.errors import InputError
from dspark_deploy.profile.schema import Expectation, Slo, SweepSettings
from tests.support.cli import Tune
from tests.unit.profiles import TEXT, load, write
from tuning import sweep
from tuning.commands.common import counts, finite, numbers, rates


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    return Tune(monkeypatch, capsys)


def commands(app: typer.Typer) -> list[Any]:
    found = [command.callback for command in app.registered_commands]
    return found + [inner for group in app.registered_groups for inner in commands(group.typer_instance)]


def numeric_options() -> list[tuple[str, type, Any]]:
    """Command and option, kind, and typer's description of every option that is a number."""
    found = []
    for command in commands(sweep.app):
        if command is sweep.sweep:  # its numbers become the profile's, which the schema bounds
            continue
        for name, hint in get_type_hints(command, include_extras=True).items():
            given, *rest = get_args(hint) or (None,)
            kinds = {int, float} & {given, *get_args(given)}
            found += [(f"{command.__name__} {name}", kind, info) for kind in kinds for info in rest]
    return found


def test_every_numeric_option_is_bounded() -> None:
    found = numeric_options()
    assert {"measure_command boots", "acceptance seconds", "run seed"} <= {name for name, _, _ in found}
    for name, kind, info in found:
        assert info.min is not None and info.max is not None, f"{name} takes any number"
        assert kind is int or info.callback is finite, f"{name} takes nan"


def test_every_number_of_a_sweep_is_bounded() -> None:
    for name, field in SweepSettings.model_fields.items():
        if field.annotation in (int, int | None, float, float | None):
            kinds = {type(bound) for bound in field.metadata}
            assert kinds & {annotated_types.Le, annotated_types.Lt}, f"sweep.{name} takes any number"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_number_of_a_profile_is_infinite(tmp_path: Path, value: str) -> None:
    for section, fields in (
        (Slo, {"ttft_ms": float(value)}),
        (Expectation, {"workload": "w", "accuracy": (0.0, float(value))}),
        (SweepSettings, {"temperature": float(value)}),
    ):
        with pytest.raises(ValueError, match=r"finite|greater|lower number"):
            section(**fields)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="finite"):
        load(tmp_path, TEXT, sets=[f"sweep.accuracy_margin=.{value.strip('-')}"])


MEASURE = ("measure", "--profile", "test.yaml")


@pytest.mark.parametrize(
    "arguments",
    [
        *((*MEASURE, "--boots", value) for value in ("0", "-3", "1000000")),
        *((*MEASURE, f"--rates={value}") for value in ("nan", "inf", "0", "-1", "1e9", "", "2,2", "x")),
        *((*MEASURE, f"--loads={value}") for value in ("0", "", "8,8", "9" * 5000, "65537")),
        *((*MEASURE, f"--accuracy-margin={value}") for value in ("nan", "inf", "0", "-0.1", "1")),
        *((*MEASURE, f"--accuracy-problems={value}") for value in ("-1", "9" * 30)),
        *((*MEASURE, f"--temperature={value}") for value in ("nan", "inf", "-1", "1e9")),
        *((*MEASURE, f"--goodput=ttft:{value}") for value in ("nan", "0", "9" * 400, "", "1,ttft:2")),
        (*MEASURE, "--requests", "9" * 30),
        ("predict", "--profile", "test.yaml", "--num-speculative-tokens", "9" * 5000),
        *(
            ("acceptance", "--url", "http://127.0.0.1:9", "--seconds", value)
            for value in ("inf", "nan", "-1")
        ),
        *(("acceptance", "--log", "x", "--expect", value) for value in ("1,inf", "nan,nan", "1,nan")),
        ("acceptance", "--log", "x", "--block", "9" * 30),
        *(("compare", "a", "b", f"--margin={value}") for value in ("nan", "inf", "0", "-1")),
        ("gsm8k", "run", "--data", "x", "--url", "u", "--seed", "9" * 30),
        ("divergence", "--url", "u", "--prompts", "9" * 30),
        ("kernels", "--hidden", "9" * 30),
        ("sweep", "--profile", "test.yaml", "--accuracy-margin=nan"),
        ("sweep", "--profile", "test.yaml", "--trials", "9" * 30),
        ("sweep", "--profile", "test.yaml", "--loads", "9" * 5000),
        ("sweep", "--profile", "test.yaml", "--loads", "65537"),
        ("sweep", "--profile", "test.yaml", "--loads", "1,1"),
    ],
)
def test_a_number_that_nobody_means(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    done = tune(*arguments)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
    said = done.stderr + str(done.document["error"])
    assert "--" in said or "sweep." in said, "the message names the flag"
    assert len(done.document["error"]) < 12_000


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_finite_refuses_whatever_the_parser_let_through(value: str) -> None:
    assert finite(0.5) == 0.5 and finite(None) is None
    with pytest.raises(typer.BadParameter):
        finite(float(value))


def test_lists_of_numbers() -> None:
    assert counts("1, 8", "--loads") == [1, 8]
    assert rates("0.5,2", "--rates") == [0.5, 2.0] and rates(None, "--rates") == []
    assert numbers("none,3", "-k") == ["none", 3]


def test_what_a_sweep_cannot_use_is_said_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"runs on the CPU .* leave it out"):
        sweep._gpus("0", load(tmp_path).profile.hardware)
    (tmp_path / "best.yaml").mkdir()
    with pytest.raises(InputError, match="is a folder"), sweep.locked(tmp_path):
        pass
