"""Records as one page: what was measured where, each record's numbers in tables, arms and lengths in figures.

Figures have their numbers in a table beside them. The page opens without a network.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go

from dspark_deploy.launch.rundir import make_folder, write_atomically
from tuning.report import embed, line_style


def write_record_report(records: list[dict[str, Any]], path: Path) -> None:
    """Render `records` (see `tuning.record`) to `path`, in their order. Raises FileError and InputError."""
    make_folder(path.parent)
    first, sections = True, []
    for number, record in enumerate(records):
        figures = []
        for name, title, figure in record_figures(record):
            html = embed(figure, f"{number}-{name}", with_library=first)
            figures.append({"title": title, "html": html})
            first = False
        sections.append({"number": number, "record": record, "figures": figures})
    source = resources.files("tuning").joinpath("record_report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["ms"] = lambda value: "" if value is None else f"{value:.2f}"
    environment.filters["share"] = lambda value: "" if value is None else f"{value * 100:.2f} %"
    environment.filters["interval"] = _interval
    write_atomically(path, environment.from_string(source).render(sections=sections))


def _interval(value: dict[str, float] | None, scale: float = 1.0, digits: int = 2) -> str:
    if value is None:
        return "too few"
    return f"{value['low'] * scale:.{digits}f} to {value['high'] * scale:.{digits}f}"


def record_figures(record: dict[str, Any]) -> list[tuple[str, str, go.Figure]]:
    """Name, title and figure of what a record of this kind is best seen in; none for most."""
    result = record["result"]
    if record["kind"] == "measure":
        found = [("tpot", "Mean TPOT by load level", _tpot(result["arms"]))]
        rates = {
            arm["arm"]: arm["acceptance"]["per_position"]
            for arm in result["arms"]
            if arm["state"] == "complete" and arm["acceptance"] and arm["acceptance"]["per_position"]
        }
        return found + ([("acceptance", "Acceptance by position", _positions(rates))] if rates else [])
    if record["kind"] == "acceptance" and result["per_position"]:
        return [("acceptance", "Acceptance by position", _positions({"measured": result["per_position"]}))]
    if record["kind"] == "predict":
        return [("predicted", "TPOT by k", _predicted(result))]
    return []


def _tpot(arms: list[dict[str, Any]]) -> go.Figure:
    figure = go.Figure()
    for index, arm in enumerate(arm for arm in arms if arm["state"] == "complete"):
        loads = [load for load in arm["loads"] if load["valid"] and load["boot"] == 1]
        means = [load["tpot_ms"]["mean"] for load in loads]
        above = [load["tpot_ms"]["mean_interval"]["high"] - load["tpot_ms"]["mean"] for load in loads]
        below = [load["tpot_ms"]["mean"] - load["tpot_ms"]["mean_interval"]["low"] for load in loads]
        figure.add_scatter(
            x=[load["level"] for load in loads],
            y=means,
            name=arm["arm"],
            error_y={"type": "data", "array": above, "arrayminus": below},
            **line_style(index),
        )
    figure.update_yaxes(title="mean TPOT, ms", rangemode="tozero")
    return figure


def _positions(rates: dict[str, list[float]]) -> go.Figure:
    figure = go.Figure()
    for index, (name, values) in enumerate(rates.items()):
        figure.add_scatter(x=list(range(1, len(values) + 1)), y=values, name=name, **line_style(index))
    figure.update_xaxes(title="position in the draft", dtick=1)
    figure.update_yaxes(title="share of drafts accepted", range=[0, 1])
    return figure


def _predicted(result: dict[str, Any]) -> go.Figure:
    figure = go.Figure()
    loads = sorted({row["concurrency"] for row in result["predictions"]})
    for index, load in enumerate(loads):
        rows = [row for row in result["predictions"] if row["concurrency"] == load]
        ks, values = [row["k"] for row in rows], [row["tpot_ms"] for row in rows]
        figure.add_scatter(x=ks, y=values, name=f"predicted, load {load}", **line_style(2 * index))
        known = [row for row in result["errors"] if row["concurrency"] == load]
        if known:
            ks, values = [row["k"] for row in known], [row["tpot_ms_measured"] for row in known]
            figure.add_scatter(x=ks, y=values, name=f"measured, load {load}", **line_style(2 * index + 1))
    figure.update_xaxes(title="speculative tokens", dtick=1)
    figure.update_yaxes(title="mean TPOT, ms", rangemode="tozero")
    return figure
