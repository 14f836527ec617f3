"""Writes the best configuration back as a profile that `dspark-serve` takes as it is.

The profile's own comments and order survive: only values that differ are changed in its text. Settings that
came from a parent (`extends`) or from `--set` are written out, so that the file stands by itself; secrets are
not, since such files are passed on: they become references to the environment, which the preflight asks for.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarfloat import ScalarFloat

from dspark_deploy.launch.command import SECRET_VARIABLES
from dspark_deploy.launch.rundir import write_atomically
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.schema import REFERENCE
from dspark_deploy.redaction import redacted
from tuning.space import Configuration

ARGS = "engine.args."


class _Exact(RoundTripRepresenter):
    """Writes a number as it was written, unless that is another number in its last digit."""

    def exact_float(self, value: ScalarFloat) -> ScalarNode:
        node = self.represent_scalar_float(value)
        return node if float(node.value) == value else self.represent_float(float(value))


_Exact.add_representer(ScalarFloat, _Exact.exact_float)


def write_best(
    loaded: LoadedProfile,
    configuration: Configuration,
    header: list[str],
    path: Path,
    lowered: Mapping[str, Any] | None = None,
) -> None:
    """Write `path`: the profile with `configuration`, headed by comment lines that say where it is from.

    `lowered` is the setting that had to be lowered for it to be measured; it is served as it was measured.
    """
    changes = configuration.changes()
    if lowered is not None:
        changes[f"engine.args.{lowered['setting']}"] = lowered["after"]
    given = loaded.profile.engine.args
    for path_of in [name for name, value in changes.items() if value is None and name.startswith(ARGS)]:
        if path_of.removeprefix(ARGS) not in given:
            del changes[path_of]  # a flag that is left to vLLM need not be named
    values = loaded.revised(changes).values
    secrets = refer_to_secrets(values)
    if secrets:
        header = [*header, f"Secrets are not in it; set in the environment: {', '.join(secrets)}."]
    yaml = YAML()
    yaml.Representer = _Exact
    yaml.preserve_quotes = True
    yaml.width = 110
    document = yaml.load(loaded.source.read_text(encoding="utf-8"))
    reconcile(document, values)
    text = io.StringIO()
    yaml.dump(document, text)
    # What is no secret by its name may be one all the same.
    write_atomically(path, "".join(f"# {line}\n" for line in header) + text.getvalue(), private=True)


def refer_to_secrets(values: dict[str, Any]) -> list[str]:
    """Replace the secrets of a profile's values by references; returns the variables that must be set."""
    engine = values.get("engine", {})
    args, env = engine.get("args", {}), engine.get("env", {})
    found = []
    for flag, name in SECRET_VARIABLES.items():
        if args.pop(flag, None) is not None:  # vLLM reads the variable itself
            found.append(name)
    for name, value in env.items():
        if redacted({name: value}) != {name: value} and not REFERENCE.search(value):
            env[name] = f"${{{name}}}"
            found.append(name)
    return found


def reconcile(document: CommentedMap, values: Mapping[str, Any]) -> None:
    """Make `document` hold exactly `values`, touching only what differs."""
    for key in [key for key in document if key not in values]:
        del document[key]
    for key, value in values.items():
        present = document.get(key)
        if isinstance(present, CommentedMap) and isinstance(value, Mapping):
            reconcile(present, value)
        elif key not in document or present != value:
            document[key] = value
