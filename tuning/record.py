"""A record: one measurement or verdict with everything that says what it belongs to, as one JSON file.

    python -m tuning.record        writes tuning/record.schema.json, the published schema

Numbers without their origin compare with nothing: two acceptance lengths differ by definition, template,
temperature or data set more often than by the engine (vllm#42508). So each record names them, and the version
of the formulas; `docs/measuring.md` says what each version computes.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import models_json_schema

from dspark_deploy import __version__
from dspark_deploy.errors import InputError
from dspark_deploy.launch.rundir import make_folder, write_atomically
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.redaction import redacted
from dspark_deploy.validation import fault_lines
from tuning.machine import describe_machine
from tuning.results import RESULTS, result_faults

FORMULAS = 1
MOST_FAULTS = 5  # of one file in a message
REFERENCE = "#/$defs/{model}"
Kind = Literal[
    "measure", "acceptance", "gsm8k", "compare", "greedy-beginnings", "divergence", "predict", "kernels"
]


class Section(BaseModel):
    """Base: no unknown keys, so that the schema says all there is."""

    model_config = ConfigDict(extra="forbid")


class Workload(Section):
    """What was asked. `template` says who rendered the prompts, `sampling` how tokens were drawn."""

    name: str
    sha256: str | None = Field(description="hash of the data, null where there are none")
    template: str
    sampling: dict[str, Any]


class Engine(Section):
    """What answered. A server that isn't ours tells its version, and nothing of its profile."""

    build: str = Field(description="vLLM's distribution and version")
    versions: str
    url: str | None = Field(description="null for an engine that was booted for this record")
    profile: str | None
    profile_sha256: str | None = Field(description="hash of the resolved profile without its secrets")
    hardware: str = Field(description="'CPU engine' is in it where a CPU answered")


class Record(Section):
    """One record. `result` has the fields of its kind; see `tuning.results` and docs/measuring.md."""

    kind: Kind
    formulas: int = Field(FORMULAS, description="version of the formulas")
    status: Literal["complete", "invalid"] = "complete"
    created: str = Field(description="UTC, ISO 8601")
    dspark_deploy: str = __version__
    engine: Engine | None = Field(description="null for a verdict over files")
    workload: Workload | None = None
    result: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json")

    def write(self, path: Path) -> None:
        """One file. Raises FileError, and InputError where its folder can't be made."""
        make_folder(path.parent)
        write_atomically(path, json.dumps(self.as_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Record:
        """A record file. Raises InputError."""
        try:
            record = cls.model_validate_json(path.read_bytes())
            faults = result_faults(record.kind, record.result)
        except OSError as error:
            raise InputError(f"{path}: is no record of dspark-tune: {error.strerror}") from error
        except ValidationError as error:
            faults = fault_lines(error)
        if faults:
            more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
            told = "; ".join(faults[:MOST_FAULTS]) + more
            raise InputError(f"{path}: is no record of dspark-tune, or a damaged one: {told}")
        return record


def now() -> str:
    """This moment, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def profile_sha256(loaded: LoadedProfile) -> str:
    """Of the resolved profile. Secrets are masked first, so that their hash isn't in a record either."""
    resolved = redacted(loaded.profile.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()


def own_engine(loaded: LoadedProfile, facts: Facts) -> Engine:
    """An engine that is booted from a profile on this machine."""
    machine = describe_machine(facts)
    return Engine(
        build=machine["engine"],
        versions=machine["versions"],
        url=None,
        profile=loaded.profile.name,
        profile_sha256=profile_sha256(loaded),
        hardware=machine["hardware"],
    )


UNKNOWN_MACHINE = "machine unknown (a server doesn't tell it, and --machine was not given)"


def foreign_engine(url: str, told: dict[str, str], machine: str | None) -> Engine:
    """A server that somebody else started: what it tells, and what a person says of its machine."""
    return Engine(
        build=f"vllm {told['version']}".strip(),
        versions="",
        url=url,
        profile=None,
        profile_sha256=None,
        hardware=UNKNOWN_MACHINE if machine is None else f"{machine} (as --machine says)",
    )


def text_sha256(texts: list[str]) -> str:
    """Hash of prompts in their order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def schema_text() -> str:
    """The published schema."""
    schema = Record.model_json_schema()
    _, results = models_json_schema(
        [(model, "validation") for model in RESULTS.values()], ref_template=REFERENCE
    )
    clauses = [
        {
            "if": {"properties": {"kind": {"const": kind}}},
            "then": {"properties": {"result": {"$ref": REFERENCE.format(model=model.__name__)}}},
        }
        for kind, model in RESULTS.items()
    ]
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "$defs": schema["$defs"] | results["$defs"],
        "allOf": clauses,
    }
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    write_atomically(Path(__file__).with_name("record.schema.json"), schema_text())
