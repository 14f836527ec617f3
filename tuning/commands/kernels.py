"""`dspark-tune kernels`: NRMSE of each mHC provider against fp64 on this device, as one table.

    dspark-tune kernels --hidden 5120 --streams 4
    dspark-tune kernels --profile mi355x.yaml --providers auto,native

Exit code 7 where an output lies outside the numerics gate's limits. See `judging.kernels`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_deploy.console import people
from dspark_deploy.errors import GateFailed, InputError, MeasurementError
from dspark_deploy.launch.log import meaningful_lines
from dspark_deploy.launch.rundir import refuse_unwritable
from dspark_deploy.launch.supervised import Supervised
from dspark_deploy.preflight import probe
from dspark_deploy.profile import load_profile
from tuning.commands.common import Json, ProfileOption, Sets, conclude, words
from tuning.judging.kernels import PROVIDERS, TOKENS, table, wrong
from tuning.record import Engine as EngineOfRecord
from tuning.record import Record, now, own_engine

LIMIT_S = 900
V4_HIDDEN, V4_STREAMS = 4096, 4
MOST_HIDDEN, MOST_STREAMS = 65_536, 64


def kernels(
    profile: ProfileOption = None,
    sets: Sets = None,
    hidden: Annotated[
        int | None, typer.Option(help=f"Hidden size [{V4_HIDDEN}]", min=64, max=MOST_HIDDEN)
    ] = None,
    streams: Annotated[
        int | None, typer.Option(help=f"mHC streams [{V4_STREAMS}]", min=1, max=MOST_STREAMS)
    ] = None,
    providers: Annotated[str, typer.Option(help=f"Of {', '.join(PROVIDERS)}")] = ",".join(PROVIDERS),
    out: Annotated[Path | None, typer.Option(help="Write the record here")] = None,
    as_json: Json = False,
) -> None:
    """Run every provider's mHC operators against fp64."""
    console = people(as_json)
    names = words(providers) or []
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown or not names:
        raise InputError(f"--providers {providers}: {unknown[:1] or 'nothing'} is none of {PROVIDERS}")
    engine: EngineOfRecord | None = None
    if profile is not None:
        loaded = load_profile(profile, sets or [])
        facts = probe(loaded.profile)
        engine = own_engine(loaded, facts)
        config = facts.model.config if facts.model else {}
        hidden = hidden or config.get("hidden_size")
        streams = streams or config.get("hc_mult")
        if not streams:
            raise InputError(f"{profile}: its model has no mHC (no hc_mult in config.json); name --streams")
    hidden, streams = hidden or V4_HIDDEN, streams or V4_STREAMS
    if out is not None:
        refuse_unwritable(out)
    found = {}
    for number, name in enumerate(names, 1):
        console.print(f"provider {number} of {len(names)}: {name}, up to {LIMIT_S} s ...", markup=False)
        started = time.monotonic()
        found[name] = run_provider(name, hidden, streams)
        ended = "not here" if "refused" in found[name] else "done"
        console.print(f"  {ended} after {time.monotonic() - started:.0f} s", markup=False)
    rows = table(found)
    result: dict[str, Any] = {
        "hidden": hidden,
        "streams": streams,
        "tokens": list(TOKENS),
        "devices": sorted({document["device"] for document in found.values() if "device" in document}),
        "table": rows,
        "refused": {name: document["refused"] for name, document in found.items() if "refused" in document},
        "skipped": {name: document["skipped"] for name, document in found.items() if document.get("skipped")},
        "wrong": wrong(found),
    }
    show(console, result)
    record = Record(kind="kernels", created=now(), engine=engine, result=result)
    if result["wrong"]:
        if out is not None:
            record.write(out)
        raise GateFailed("mHC operators are wrong here:\n  " + "\n  ".join(result["wrong"]), record.as_json())
    if not rows:
        raise MeasurementError("no provider could be run here; the reasons are above")
    conclude(console, record, out, as_json)


def run_provider(name: str, hidden: int, streams: int) -> dict[str, Any]:
    """One provider in a child. Raises MeasurementError where the child fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "tuning.judging.kernels", name, str(hidden), str(streams)]
        with Supervised(command, os.environ, log, grace_s=5) as process:
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise MeasurementError(f"provider {name} did not end within {LIMIT_S} s") from None
        if code:
            lines = "\n".join(f"    {line}" for line in meaningful_lines(log))
            raise MeasurementError(f"provider {name} ended with code {code}:\n{lines}")
        return dict(json.loads(log.read_text().splitlines()[-1]))


def show(console: Console, result: dict[str, Any]) -> None:
    """The table: a row per output and provider, a column per number of tokens."""
    made = Table(
        title=f"NRMSE against fp64, hidden {result['hidden']}, {result['streams']} streams, "
        f"{', '.join(result['devices'])}",
        title_justify="left",
    )
    for column in ("operator", "variant", "output", "provider"):
        made.add_column(column, overflow="fold")
    for tokens in result["tokens"]:
        made.add_column(f"{tokens} tokens", justify="right")
    for row in result["table"]:
        values = (row["nrmse"].get(str(tokens)) for tokens in result["tokens"])
        cells = ("" if value is None else f"{value:.2e}" for value in values)
        made.add_row(row["operator"], row["variant"], row["output"], row["provider"], *cells)
    console.print(made)
    for name, reason in result["refused"].items():
        console.print(f"{name}: not here: {reason}", markup=False)
    for name, operators in result["skipped"].items():
        for operator, reason in operators.items():
            console.print(f"{name}: {operator} can't run here: {reason}", markup=False)
