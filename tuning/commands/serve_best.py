"""`dspark-tune serve-best`: from a sweep's folder to the running server.

    dspark-tune serve-best runs/sweep-cpu-tiny
    dspark-tune serve-best runs/sweep-cpu-tiny --goal throughput --set engine.port=8001
    dspark-tune serve-best runs/sweep-cpu-tiny --check

It is `dspark-serve --profile FOLDER/best-GOAL.yaml`: the same preflight, launch, table and exit codes. What
the sweep found about this profile is printed first. Not covered: a sweep that has not been concluded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_deploy.console import people
from dspark_deploy.errors import InputError
from dspark_deploy.plain_json import parse_json
from dspark_deploy.serve import launch

Goal = Annotated[str | None, typer.Option(help="latency, throughput or slo [the sweep's own]")]


def serve_best(
    folder: Annotated[Path, typer.Argument(help="A sweep's folder")],
    goal: Goal = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="path=value; may be repeated")] = None,
    check_only: Annotated[bool, typer.Option("--check", help="Only report findings")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing")] = False,
    run_dir: Annotated[Path, typer.Option(help="Where run directories are made")] = Path("runs"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Engine's log only into the run directory")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last stdout line is one JSON document")] = False,
) -> None:
    """Serve the best profile of a sweep, as dspark-serve does."""
    path, result = best_profile(folder, goal)
    wanted = goal or result["settings"]["goal"]
    answer = result["goals"][wanted]
    people(as_json).print(
        f"{path}: {answer['best']} for {wanted}, {answer['reason']}; {answer['verdict']}", markup=False
    )
    launch(
        str(path),
        sets or [],
        check_only=check_only,
        dry_run=dry_run,
        run_dir=run_dir,
        quiet=quiet,
        as_json=as_json,
    )


def best_profile(folder: Path, goal: str | None) -> tuple[Path, dict[str, Any]]:
    """The profile that a sweep wrote for a goal, and its result. Raises InputError."""
    file = folder / "result.json"
    try:
        result = parse_json(file.read_text(encoding="utf-8"))
        answer = result["goals"].get(goal or result["settings"]["goal"])
        known = [name for name, each in result["goals"].items() if each]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{file}: is no result of a sweep ({error}); has the sweep ended?") from error
    if answer is None:
        raise InputError(
            f"{folder}: this sweep has no answer for {goal or 'its goal'}; it has: {', '.join(known)}"
        )
    path = folder / ("best.yaml" if goal is None else f"best-{goal}.yaml")
    if not path.is_file():
        raise InputError(f"{path}: is missing; run the sweep again, which measures nothing twice")
    return path, result
