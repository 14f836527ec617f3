"""The command `dspark-serve`: a profile becomes a checked, running vLLM server.

    dspark-serve --profile cpu-tiny.yaml --check          what would go wrong, without starting anything
    dspark-serve --profile cpu-tiny.yaml --dry-run        the exact command and environment
    dspark-serve --profile cpu-tiny.yaml --facts-only     this machine as the preflight sees it, for --facts
    dspark-serve --profile mi355x.yaml --selftest         only the numerics gate: mHC operators against fp64
    dspark-serve --profile cpu-tiny.yaml                  serve until a signal comes
    dspark-serve --profile mi355x.yaml --prewarm          fill the kernel caches on disk, then stop
    dspark-serve --profile cpu-tiny.yaml -- --seed 4     flags after -- go to vLLM as they are
    dspark-serve --profile mi355x.yaml --emit kubernetes --image IMAGE    the launch as a file
    dspark-serve --profile pair.yaml --node-rank 1 --head-address 10.0.0.1    one node of several

Exit codes: 0 good; 2 bad input; 3 preflight refused; 4 numerics gate refused; 5 the engine did not start; 6
it died; 130 stopped by a signal (everything it started is gone by then).

Not covered here: measuring (`dspark-tune`).
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_deploy.console import engine_log, people, print_json, run_app, show_findings
from dspark_deploy.emit import Format, render
from dspark_deploy.errors import InputError, PreflightRefused
from dspark_deploy.launch import command as rendering
from dspark_deploy.launch import numerics, resolved
from dspark_deploy.launch.engine import Engine, ReadyReport
from dspark_deploy.launch.kernels import kernel_lines
from dspark_deploy.launch.nodes import node_flags
from dspark_deploy.launch.prewarm import run_prewarm
from dspark_deploy.launch.rundir import make_folder, new_run_directory, write_atomically
from dspark_deploy.plugin.registry import State
from dspark_deploy.preflight import Facts, Severity, check, probe
from dspark_deploy.profile import LoadedProfile, load_profile
from dspark_deploy.profile.flags import parse_flags

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FOLLOW_S = 0.5


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def serve(
    context: typer.Context,
    profile: Annotated[str, typer.Option(help="YAML file, or the name of a shipped profile")],
    model: Annotated[str | None, typer.Option(help="Checkpoint in place of the profile's model.path")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="path=value; may be repeated")] = None,
    facts: Annotated[Path | None, typer.Option(help="JSON facts of another machine; not probed here")] = None,
    check_only: Annotated[bool, typer.Option("--check", help="Only report findings")] = False,
    facts_only: Annotated[
        bool, typer.Option("--facts-only", help="Print this machine's facts as JSON")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing")] = False,
    prewarm: Annotated[bool, typer.Option("--prewarm", help="Fill kernel caches on disk, then stop")] = False,
    selftest: Annotated[bool, typer.Option("--selftest", help="Only the numerics gate, then stop")] = False,
    emit: Annotated[Format | None, typer.Option(help="Write the checked launch as a file for this")] = None,
    image: Annotated[
        str | None, typer.Option(help="--emit: container image with dspark-deploy in it")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="--emit: the file to write; else stdout")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which node of engine.args.nnodes this is")] = None,
    head_address: Annotated[str | None, typer.Option(help="Where the other nodes reach node 0")] = None,
    run_dir: Annotated[Path, typer.Option(help="Where run directories are made")] = Path("runs"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Engine's log only into the run directory")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last stdout line is one JSON document")] = False,
) -> None:
    """Serve a profile with vLLM, once the preflight finds nothing against it."""
    modes = {"--check": check_only, "--dry-run": dry_run, "--facts-only": facts_only}
    modes |= {"--prewarm": prewarm, "--selftest": selftest, "--emit": emit is not None}
    asked = [name for name, is_asked in modes.items() if is_asked]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} exclude one another; each checks the profile first")
    overrides = {} if model is None else {"model.path": model}
    # The gate speaks in every worker; the verdict is this command's.
    loaded = load_profile(profile, sets or [], overrides | ({"mhc.gate": "warn"} if selftest else {}))
    if emit is None and (image is not None or out is not None):
        raise InputError("--image and --out belong to --emit; engine.image is for the preflight")
    # Where the rendered file goes to stdout, nothing else may.
    console = people(as_json or (emit is not None and out is None))
    if facts is not None and not (check_only or dry_run or facts_only or emit):
        raise InputError("--facts describes another machine; use it with --check, --dry-run or --emit")
    known = Facts.from_file(facts) if facts else probe(loaded.profile)
    if facts_only:
        print_json(known.as_json())
        return
    extra = list(context.args)
    rendering.refuse_secret_flags(extra)
    if emit is not None and node_rank is not None:
        raise InputError("--emit writes every node; leave --node-rank out")
    said = node_rank is not None or head_address is not None or "node-rank" in parse_flags(extra).args
    placed = emit is None and said
    place = node_flags(loaded, node_rank, head_address, extra) if placed else []
    checked(console, loaded, known, extra, check_only, as_json)
    if emit is not None:
        _emit(console, emit, loaded, image, head_address, extra, out, as_json)
        return
    if not placed and not dry_run:
        place = node_flags(loaded, None, None, extra)  # of several nodes, nobody says which this one is
    extra = [*place, *extra]
    if dry_run:
        _dry_run(console, loaded, known, extra, as_json)
        return
    start = run_prewarm if prewarm else _selftest if selftest else _serve
    start(console, loaded, known, extra, run_dir, quiet, as_json)


def launch(
    profile: str,
    sets: list[str],
    *,
    check_only: bool = False,
    dry_run: bool = False,
    run_dir: Path = Path("runs"),
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """What `dspark-serve --profile PROFILE` does, for commands that know which profile to serve."""
    if check_only and dry_run:
        raise InputError("--check and --dry-run exclude one another; each checks the profile first")
    console = people(as_json)
    loaded = load_profile(profile, sets)
    facts = probe(loaded.profile)
    checked(console, loaded, facts, [], check_only, as_json)
    if dry_run:
        _dry_run(console, loaded, facts, [], as_json)
    else:
        _serve(console, loaded, facts, [], run_dir, quiet, as_json)


def checked(
    console: Console, loaded: LoadedProfile, facts: Facts, extra: list[str], check_only: bool, as_json: bool
) -> None:
    """Show the findings. Raises PreflightRefused; after --check it ends the command."""
    findings = check(loaded, facts, extra)
    refused = any(finding.severity is Severity.ERROR for finding in findings)
    show_findings(console, findings)
    if check_only:
        verdict = "refused" if refused else "ok"
        console.print(f"preflight: {verdict}")
        if as_json:
            code = {"exit_code": PreflightRefused.exit_code} if refused else {}
            print_json({"verdict": verdict, "findings": [f.as_json() for f in findings], **code})
        raise typer.Exit(PreflightRefused.exit_code if refused else 0)
    if refused:
        raise PreflightRefused(
            "preflight refused this launch; the findings above say why, and what to do",
            [finding.as_json() for finding in findings],
        )


def _dry_run(console: Console, loaded: LoadedProfile, facts: Facts, extra: list[str], as_json: bool) -> None:
    profile = loaded.profile
    command = rendering.redacted_command(rendering.serve_command(profile, facts, profile.engine.port, extra))
    env = rendering.engine_environment(profile, Path("RUN_DIRECTORY/settings.json"), os.environ)
    added = rendering.added_environment(profile, env)
    for name, value in added.items():
        console.print(f"{name}={shlex.quote(value)} \\", markup=False)
    console.print(shlex.join(command), markup=False)
    if as_json:
        print_json({"command": command, "environment": added})


def _emit(
    console: Console,
    form: Format,
    loaded: LoadedProfile,
    image: str | None,
    head: str | None,
    extra: list[str],
    out: Path | None,
    as_json: bool,
) -> None:
    rendered = render(form, loaded, image, head, extra)
    if out is not None:
        make_folder(out.parent)
        write_atomically(out, rendered.text)
        console.print(f"{out}: {form}, with its secrets by name: {', '.join(rendered.secrets)}", markup=False)
    if as_json:
        place = {"file": str(out)} if out is not None else {"text": rendered.text}
        print_json({"status": "rendered", "format": form, "secrets": rendered.secrets, **place})
    elif out is None:
        sys.stdout.write(rendered.text)


def _serve(
    console: Console,
    loaded: LoadedProfile,
    facts: Facts,
    extra: list[str],
    run_dir: Path,
    quiet: bool,
    as_json: bool,
) -> None:
    run = new_run_directory(run_dir, loaded.profile.name)
    console.print(f"run directory: {run.path}", markup=False)
    echo = engine_log(quiet)
    with Engine.start(loaded, facts, run, extra) as engine:
        report = engine.wait_ready(echo)
        run.write_json("ready.json", report.as_json())
        show_ready(console, report, loaded)
        if as_json:
            print_json({"status": "ready", "run_directory": str(run.path), **report.as_json()})
        while True:
            engine.follow(echo)
            engine.check_alive()
            time.sleep(FOLLOW_S)


def _selftest(
    console: Console,
    loaded: LoadedProfile,
    facts: Facts,
    extra: list[str],
    run_dir: Path,
    quiet: bool,
    as_json: bool,
) -> None:
    run = new_run_directory(run_dir, f"{loaded.profile.name}-selftest")
    console.print(f"run directory: {run.path}", markup=False)
    # The operators are checked on inputs of the gate's own, so weights needn't be read.
    if loaded.profile.hardware.platform != "cpu" and "load-format" not in parse_flags(extra).args:
        extra = [*extra, "--load-format", "dummy"]
    with Engine.start(loaded, facts, run, extra) as engine:
        found = engine.wait_numerics(engine_log(quiet))
    run.write_json("numerics.json", {"numerics": found})
    numerics.show(console, found)
    refused = numerics.refusal(found)
    if refused is not None:
        raise refused
    if as_json:
        print_json({"status": numerics.state(found), "run_directory": str(run.path), numerics.SECTION: found})


def show_ready(console: Console, report: ReadyReport, loaded: LoadedProfile) -> None:
    """Print where the engine listens, and what was patched in its processes and why."""
    table = Table(title="patches", title_justify="left")
    for column in ("patch", "state", "processes", "what for", "detail"):
        table.add_column(column, overflow="fold")
    for row in patch_rows(report.processes):
        table.add_row(row["name"], row["state"], str(row["processes"]), row["why"], row["detail"])
    if table.row_count:
        console.print(table)
    else:
        console.print("no patches were needed for this platform")
    for line in kernel_lines(report.processes):
        console.print(line, markup=False)
    gated = numerics.sections(report.processes)
    if gated:
        numerics.show(console, gated)
    resolved.show(console, report.differences)
    if not resolved.sections(report.processes):
        console.print("what vLLM made of its flags was not reported; engine.log has vLLM's own lines")
    model = rendering.served_name(loaded.profile)
    told = f"{report.url}/v1, model {model!r}" if report.url else f"workers of {model!r}; node 0 answers"
    console.print(f"ready after {report.seconds:.1f} s: {told}", markup=False)


def patch_rows(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per patch, state and detail, with the number of processes it was seen in.

    Patches named `group:member` that ended alike share a row, which lists the members.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    members: dict[tuple[str, ...], dict[str, None]] = {}
    seen: dict[tuple[str, ...], set[int]] = {}
    for process in processes:
        for patch in process["patches"]:
            group, colon, member = patch["name"].partition(":")
            # A refusal has a reason of its own; what went well is alike enough to be one row.
            detail = "" if colon and patch["state"] == State.APPLIED else patch["detail"]
            key = (group, patch["state"], detail)
            rows.setdefault(key, {**patch, "name": group})
            seen.setdefault(key, set()).add(process["pid"])
            if colon:
                members.setdefault(key, {})[member] = None
    for found, row in rows.items():
        row["processes"] = len(seen[found])
        if found in members:
            names = ", ".join(members[found])
            row["name"] = f"{row['name']} ({len(members[found])})"
            row["detail"] = f"{names}: {row['detail']}" if found[2] else names
    return list(rows.values())


def main() -> None:
    """Entry point of `dspark-serve`."""
    run_app(app, "dspark-serve")


if __name__ == "__main__":
    main()
