"""`dspark-tune predict`: acceptance length and TPOT of smaller k, from one run and forced acceptance.

    dspark-tune predict --profile cpu-tiny.yaml --num-speculative-tokens 1,2,3,4 --loads 1,8
    dspark-tune predict --profile cpu-tiny.yaml --num-speculative-tokens 1,2,3,4 --check

Boots the profile's own k once, an engine with synthetic acceptance for each k, and with `--check` the real
one as well, whose error it reports. See `judging.prediction` for the formulas and what they leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_deploy.console import people
from dspark_deploy.errors import InputError, MeasurementError
from dspark_deploy.launch.rundir import fresh_folder, make_folder
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.loading import validated
from dspark_deploy.profile.schema import MOST_REQUESTS
from tuning.commands.common import Json, Sets, checked_profile, conclude, counts, require_libraries
from tuning.judging.prediction import errors, predict, predicted_lengths, synthetic_flags
from tuning.measurement import LoadMeasurement, Measurement, Plan, measure
from tuning.plans import refuse_what_cannot_be_asked
from tuning.record import Record, Workload, now, own_engine
from tuning.workload import Workload as Source
from tuning.workload import find_workload


def predict_command(
    profile: Annotated[str, typer.Option(help="YAML file, or the name of a shipped profile")],
    num_speculative_tokens: Annotated[str, typer.Option(help="Predict these, as 1,2,3,4")],
    sets: Sets = None,
    loads: Annotated[str | None, typer.Option(help="Requests in flight, as 1,8")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests at each level", min=1, max=MOST_REQUESTS)
    ] = None,
    workload: Annotated[str | None, typer.Option(help="Real text: never random")] = None,
    data: Annotated[Path | None, typer.Option(help="The workload's file")] = None,
    check: Annotated[bool, typer.Option("--check", help="Measure each k too, and report the error")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder [runs/predict-PROFILE]")] = None,
    as_json: Json = False,
) -> None:
    """Predict TPOT and acceptance length of each k."""
    console = people(as_json)
    ks = counts(num_speculative_tokens, "--num-speculative-tokens")
    closed = None if loads is None else counts(loads, "--loads")
    loaded, facts = checked_profile(console, profile, sets)
    speculative = loaded.profile.speculative
    if speculative is None or max(ks) > speculative.num_speculative_tokens:
        largest = speculative.num_speculative_tokens if speculative else 0
        raise InputError(
            f"k = {max(ks)} can't be predicted from the profile's num_speculative_tokens: {largest}; "
            f"set it to the largest k"
        )
    settings = loaded.profile.sweep
    source = find_workload(workload or settings.workload, data)
    if not source.ranks_k:
        raise InputError(f"workload {source.name} never ranks k, so it predicts none; use real text")
    require_libraries({"pandas": "vllm bench serve reads its prompts with it: pip install pandas"})
    plan = Plan(
        loads=closed or list(settings.loads),
        requests=requests or settings.prompts_per_load,
        output_tokens=settings.output_tokens,
        temperature=settings.temperature,
    )
    refuse_what_cannot_be_asked(plan, source, loaded)
    folder = out or Path("runs") / f"predict-{loaded.profile.name}"
    make_folder(folder)
    runs = _Runs(console, loaded, facts, plan, source, folder)
    base = runs.measure("base", loaded, [])
    lengths = predicted_lengths(base.acceptance, ks)
    delivered = _delivered(base.loads)
    steps, measured = {}, {}
    for k in ks:
        one = validated(loaded, {"speculative.num_speculative_tokens": k})
        flags = synthetic_flags(speculative, facts, base.acceptance, k)
        for load in runs.measure(f"synthetic-k{k}", one, flags).loads:
            steps[k, load.result.concurrency] = load.summary["chunk_gap_ms"]["mean"]
        if check:
            real = runs.measure(f"measured-k{k}", one, [])
            for load in real.loads:
                # The length is pooled over the levels: it is the text's, and more drafts say more of it.
                measured[k, load.result.concurrency] = (real.acceptance.length, load.result.mean_tpot_ms)
    predictions = predict(lengths, steps, delivered)
    result: dict[str, Any] = {
        "from_k": speculative.num_speculative_tokens,
        "acceptance_length": base.acceptance.length,
        "per_position": base.acceptance.position_rates,
        "delivered": delivered,
        "predictions": [asdict(each) for each in predictions],
        "errors": errors(predictions, measured),
    }
    _show(console, result)
    record = Record(
        kind="predict",
        created=now(),
        engine=own_engine(loaded, facts),
        workload=Workload(
            name=source.name,
            sha256=source.fingerprint(),
            template=source.template,
            sampling={"temperature": plan.temperature, "max_tokens": plan.output_tokens},
        ),
        result=result,
    )
    conclude(console, record, runs.folder / "record.json", as_json)


class _Runs:
    """Engines of one prediction, each in a folder of its own."""

    def __init__(
        self,
        console: Console,
        loaded: LoadedProfile,
        facts: Facts,
        plan: Plan,
        source: Source,
        folder: Path,
    ) -> None:
        self.folder = folder
        self._console, self._loaded, self._facts = console, loaded, facts
        self._plan, self._source = plan, source

    def measure(self, name: str, loaded: LoadedProfile, extra: list[str]) -> Measurement:
        place = self.folder / name
        fresh_folder(place)
        found, _, _ = measure(
            loaded,
            self._facts,
            self._plan,
            self._source,
            place,
            lambda phase: self._console.print(f"{name}: {phase}", markup=False),
            extra,
        )
        if any(
            "chunk_gap_ms" not in load.summary or not load.summary["chunk_gap_ms"] for load in found.loads
        ):
            raise MeasurementError(f"{name}: the answers came in one chunk each, so there is no step time")
        return found


def _delivered(loads: Sequence[LoadMeasurement]) -> float:
    """Share of the counted tokens per step that reached clients; 1 where the engine doesn't tell."""
    found = [
        (load.summary["acceptance"]["delivered_length"], load.acceptance)
        for load in loads
        if load.summary["acceptance"].get("delivered_length")
    ]
    emitted = sum(length * counted.drafts for length, counted in found)
    whole = sum(counted.length * counted.drafts for _, counted in found)
    return emitted / whole if whole else 1.0


def _show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"predicted from k = {result['from_k']}", title_justify="left")
    for column in ("k", "load", "acceptance length", "step ms", "TPOT ms", "length error", "TPOT error"):
        table.add_column(column, justify="right")
    by_place = {(row["k"], row["concurrency"]): row for row in result["errors"]}
    for each in result["predictions"]:
        row = by_place.get((each["k"], each["concurrency"]))
        table.add_row(
            str(each["k"]),
            str(each["concurrency"]),
            f"{each['acceptance_length']:.3f}",
            f"{each['step_ms']:.2f}",
            f"{each['tpot_ms']:.2f}",
            f"{row['acceptance_length_error']:+.1%}" if row else "",
            f"{row['tpot_error']:+.1%}" if row else "",
        )
    console.print(table)
