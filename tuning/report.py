"""The sweep's report: one HTML file that opens without a network.

Every figure has its numbers in a table beside it, so that nothing depends on seeing or hovering.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
import plotly.io

from dspark_deploy.launch.rundir import make_folder, write_atomically

# Okabe and Ito's colours: told apart by people who do not see red and green.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "hexagon")

MOST_FAMILIES = 4


def write_report(result: dict[str, Any], path: Path) -> None:
    """Render `result` (see `tuning.result`) to `path`. Raises FileError, InputError."""
    complete = [cell for cell in result["cells"] if cell["state"] == "complete"]
    figures = [
        ("acceptance", "Acceptance by position", "positions", acceptance_figure(complete)),
        ("tpot", "TPOT by number of speculative tokens", "loads", tpot_figure(complete)),
        ("pareto", "Latency against throughput", "frontier", pareto_figure(complete, result)),
        ("accuracy", "Accuracy and its interval", "table", accuracy_figure(complete)),
    ]
    if result["baseline"]:
        title = "Best so far, and by chance"
        figures.append(("baseline", title, "search", baseline_figure(result["baseline"])))
    rendered = [
        {"id": name, "title": title, "table": table, "html": embed(figure, name, with_library=index == 0)}
        for index, (name, title, table, figure) in enumerate(figures)
    ]
    source = resources.files("tuning").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    # Milliseconds and tokens per second share a column.
    environment.filters["figure"] = lambda value: f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    template = environment.from_string(source)
    make_folder(path.parent)
    write_atomically(path, template.render(result=result, complete=complete, figures=rendered))


def embed(figure: go.Figure, name: str, with_library: bool) -> str:
    """A figure as HTML; the first of a page brings the library along."""
    figure.update_layout(
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        height=380,
        font={"size": 14},
        legend={"orientation": "h", "y": -0.2},
    )
    return str(
        plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=with_library,
            div_id=f"figure-{name}",
            config={"displayModeBar": False, "responsive": True},
        )
    )


def acceptance_figure(cells: list[dict[str, Any]]) -> go.Figure:
    """Share of drafts accepted at each position, a line per configuration."""
    figure = go.Figure()
    for index, cell in enumerate(cell for cell in cells if cell["acceptance_by_position"]):
        rates = cell["acceptance_by_position"]
        figure.add_scatter(
            x=list(range(1, len(rates) + 1)), y=rates, name=cell["configuration"], **line_style(index)
        )
    figure.update_xaxes(title="position in the draft", dtick=1)
    figure.update_yaxes(title="share of drafts accepted", range=[0, 1])
    return figure


def tpot_figure(cells: list[dict[str, Any]]) -> go.Figure:
    """Mean TPOT with its interval against k: a line per load and family, which differs by k alone.

    With more families than `MOST_FAMILIES`, those with the lowest TPOT.
    """
    figure = go.Figure()
    families: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["num_speculative_tokens"]:
            families.setdefault(cell["configuration"].partition("-")[2], []).append(cell)
    # No speculation is the common start of every line.
    none = [cell for cell in cells if cell["configuration"] == "none"]
    ranked = sorted(families.items(), key=lambda item: min(_lightest_tpot(cell) for cell in item[1]))
    lines: dict[tuple[int, str], list[tuple[int, dict[str, Any]]]] = {}
    for name, members in ranked[:MOST_FAMILIES] or [("", [])]:
        for cell in [*none, *members]:
            for load in cell["loads"]:
                point = (cell["num_speculative_tokens"], load)
                lines.setdefault((load["concurrency"], name), []).append(point)
    for index, ((concurrency, family), points) in enumerate(sorted(lines.items())):
        points.sort(key=lambda point: point[0])
        values = [load["tpot_ms"] for _, load in points]
        name = f"load {concurrency}" + (f", {family}" if len(families) > 1 else "")
        figure.add_scatter(
            x=[k for k, _ in points],
            y=values,
            name=name,
            error_y={
                "type": "data",
                "array": [load["tpot_ms_interval"]["high"] - load["tpot_ms"] for _, load in points],
                "arrayminus": [load["tpot_ms"] - load["tpot_ms_interval"]["low"] for _, load in points],
            },
            **line_style(index),
        )
    figure.update_xaxes(title="speculative tokens (0: no speculation)", dtick=1)
    figure.update_yaxes(title="mean TPOT, ms", rangemode="tozero")
    return figure


def _lightest_tpot(cell: dict[str, Any]) -> float:
    return float(min(cell["loads"], key=lambda load: int(load["concurrency"]))["tpot_ms"])


def pareto_figure(cells: list[dict[str, Any]], result: dict[str, Any]) -> go.Figure:
    """TPOT at the lightest load against output tokens/s at the heaviest; the front is joined."""
    figure = go.Figure()

    def point(cell: dict[str, Any]) -> tuple[float, float]:
        loads = sorted(cell["loads"], key=lambda load: int(load["concurrency"]))
        return loads[0]["tpot_ms"], loads[-1]["output_tokens_per_s"]

    groups = (
        ("on the front", [c for c in cells if c["accurate"] and c["pareto"]], "lines+markers+text"),
        ("behind it", [c for c in cells if c["accurate"] and not c["pareto"]], "markers+text"),
        ("accuracy not kept", [c for c in cells if not c["accurate"]], "markers+text"),
    )
    for index, (name, members, mode) in enumerate(groups):
        ordered = sorted(members, key=point)
        if ordered:
            style = {**line_style(index), "mode": mode}
            figure.add_scatter(
                x=[point(cell)[0] for cell in ordered],
                y=[point(cell)[1] for cell in ordered],
                text=[cell["configuration"] for cell in ordered],
                textposition="top center",
                name=name,
                cliponaxis=False,
                **style,
            )
    loads = result["settings"]["loads"]
    figure.update_xaxes(title=f"mean TPOT at load {min(loads)}, ms")
    figure.update_yaxes(title=f"output tokens/s at load {max(loads)}")
    return figure


def baseline_figure(baseline: dict[str, Any]) -> go.Figure:
    """Best so far by launches, of this search and as chance would have it."""
    figure = go.Figure()
    launches = list(range(1, len(baseline["found"]) + 1))
    for index, (name, key) in enumerate((("this search", "found"), ("by chance, expected", "by_chance"))):
        figure.add_scatter(x=launches, y=baseline[key], name=name, **line_style(index))
    figure.update_xaxes(title="configurations launched", dtick=max(len(launches) // 10, 1))
    figure.update_yaxes(title="best so far, in the goal's unit")
    return figure


def accuracy_figure(cells: list[dict[str, Any]]) -> go.Figure:
    """Accuracy of each configuration with Wilson's 95 % interval."""
    figure = go.Figure()
    values = [cell["accuracy"] for cell in cells]
    above = [cell["accuracy_interval"]["high"] - cell["accuracy"] for cell in cells]
    below = [cell["accuracy"] - cell["accuracy_interval"]["low"] for cell in cells]
    style = {**line_style(0), "mode": "markers"}
    figure.add_scatter(
        x=[cell["configuration"] for cell in cells],
        y=values,
        error_y={"type": "data", "array": above, "arrayminus": below},
        showlegend=False,
        **style,
    )
    figure.update_xaxes(title="configuration", type="category")
    figure.update_yaxes(title="greedy accuracy", range=[0, 1])
    return figure


def line_style(index: int) -> dict[str, Any]:
    """Colour and symbol of the line number `index`."""
    return {
        "mode": "lines+markers",
        "line": {"color": COLOURS[index % len(COLOURS)]},
        "marker": {
            "symbol": SYMBOLS[index % len(SYMBOLS)],
            "size": 9,
            "color": COLOURS[index % len(COLOURS)],
        },
    }
