"""`dspark-tune report`: one or several records as one page that opens without a network.

    dspark-tune report runs/measure-a/record.json runs/gsm8k-a/record.json --out report.html

A sweep's `result.json` has its own page; name it alone. Not covered: judging, which the records have done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_deploy.console import people, print_json
from dspark_deploy.errors import InputError
from dspark_deploy.plain_json import parse_json
from tuning.commands.common import Json, require_libraries
from tuning.record import Record


def report(
    files: Annotated[list[Path], typer.Argument(help="Records, or the folders they are in")],
    out: Annotated[Path, typer.Option(help="The page")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Render records to one HTML file."""
    line = "pip install 'dspark-deploy[report]'"
    require_libraries({"plotly": line, "jinja2": line})
    from tuning.record_report import write_record_report
    from tuning.report import write_report

    places = [path / "record.json" if path.is_dir() else path for path in files]
    swept = [found for path in places if (found := _sweep_result(path)) is not None]
    if swept and len(places) > 1:
        raise InputError("a sweep's result.json has a page of its own; name it alone")
    records = [] if swept else [Record.read(path).as_json() for path in places]
    if swept:
        write_report(swept[0], out)
    else:
        write_record_report(records, out)
    people(as_json).print(f"  {out}", markup=False)
    if as_json:
        print_json({"status": "written", "file": str(out), "records": [each["kind"] for each in records]})


def _sweep_result(path: Path) -> dict[str, Any] | None:
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # Record.read says what is wrong with it
    return document if isinstance(document, dict) and {"cells", "best"} <= document.keys() else None
