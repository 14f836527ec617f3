"""Writes the best configuration back as a profile that `dspark-serve` takes as it is.

The profile's own comments and order survive: only values that differ are changed in its text. Settings that
came from a parent (`extends`) or from `--set` are written out, so that the file stands by itself.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from dspark_deploy.launch.rundir import write_atomically
from dspark_deploy.profile import LoadedProfile
from tuning.space import Configuration

ARGS = "engine.args."


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
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 110
    document = yaml.load(loaded.source.read_text(encoding="utf-8"))
    reconcile(document, values)
    text = io.StringIO()
    yaml.dump(document, text)
    # A profile may hold what only its owner should read.
    write_atomically(path, "".join(f"# {line}\n" for line in header) + text.getvalue(), private=True)


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
