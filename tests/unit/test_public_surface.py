"""The public surface is frozen: commands, flags, exit codes, JSON keys, profile keys, finding codes.

A change here is a change that users see. To make one, change `public_surface.json` in the same commit:

    python -m tests.unit.test_public_surface
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer.main

from dspark_deploy import errors, serve
from dspark_deploy.preflight import RULES
from dspark_deploy.profile import Profile
from tests.unit.test_writing import result
from tuning import sweep

FROZEN = Path(__file__).with_name("public_surface.json")


def flags(app: typer.Typer) -> dict[str, list[str]]:
    """Flags by command."""
    command = typer.main.get_command(app)
    commands = getattr(command, "commands", None) or {"": command}
    return {
        name: sorted(
            flag for parameter in each.params for flag in (*parameter.opts, *parameter.secondary_opts)
        )
        for name, each in sorted(commands.items())
    }


def exit_codes() -> dict[str, int]:
    """Exit codes by class of error."""
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    return {c.__name__: c.exit_code for c in classes if issubclass(c, errors.DSparkError)}


def profile_keys() -> list[str]:
    """Every key of the schema, with its type and default, as dotted lines."""
    schema = Profile.model_json_schema()
    lines = []
    for name, section in {"Profile": schema, **schema["$defs"]}.items():
        for key, value in section["properties"].items():
            kept = {k: v for k, v in value.items() if k not in ("title", "description")}
            needed = " required" if key in section.get("required", []) else ""
            lines.append(f"{name}.{key}{needed}: {json.dumps(kept, sort_keys=True)}")
    return sorted(lines)


def json_keys(value: Any, path: str = "") -> list[str]:
    """Every key of a JSON document, lists being named []."""
    if isinstance(value, dict):
        return [path + "." + key for key in value] + [
            line for key, inner in value.items() for line in json_keys(inner, f"{path}.{key}")
        ]
    if isinstance(value, list):
        return [line for inner in value[:8] for line in json_keys(inner, f"{path}[]")]
    return []


def surface() -> dict[str, Any]:
    """The whole surface as plain JSON values."""
    return {
        "dspark-serve": flags(serve.app),
        "dspark-tune": flags(sweep.app),
        "exit_codes": exit_codes(),
        "finding_codes": sorted(code for rule in RULES for code in rule.codes),
        "sweep_json": sorted(set(json_keys(result()))),
        "profile": profile_keys(),
    }


def test_the_public_surface_is_what_was_agreed() -> None:
    assert surface() == json.loads(FROZEN.read_text())


def test_exit_codes_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text()
    for code in set(exit_codes().values()) | {0}:
        assert re.search(rf"^\| {code} \|", text, re.MULTILINE), f"exit code {code} is not in the table"


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(surface(), indent=1) + "\n")
