"""Fuzzing of every reader of what comes from outside: a value or an error of ours, and nothing else.

    python -m bench.fuzz --inputs 1000000 --out bench/results/fuzz.json
    python -m bench.fuzz --inputs 20000 --only profile,facts --seed 7
    python -m bench.fuzz --replay runs/fuzz/profile-1.input --only profile

In this process, each input under a limit of processor time, which other work on the machine can't use up. A
traceback, a hang and a misspelt key that is taken without a word are failures: the input is saved under
`--failures`, and the exit code is 1. Inputs are drawn by `bench.fuzzing.mutation`; where atheris is installed
(`pip install 'dspark-deploy[fuzz]'`), it draws a share of them by coverage, in a process for each target. Not
covered: crashes of Python itself, which end the run; a reader that waits for something else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import mmap
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from bench.fuzzing.targets import Target

MEMORY = Path("/dev/shm")  # a disk takes milliseconds for what memory does in microseconds
LIMIT_S = 5.0
INSTRUMENTED = ["dspark_deploy", "tuning", "yaml", "prometheus_client", "optuna.storages"]


class Hang(BaseException):
    """An input took longer than its limit. No Exception, so that no reader can swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside, Hang is raised after that much processor time of this process."""

    def ring(_number: int, _frame: FrameType | None) -> NoReturn:
        raise Hang(f"longer than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Failures:
    """What went wrong, one input kept for each place that it went wrong at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.kinds: dict[str, int] = {}

    def attempt(self, target: Target, data: bytes, refuse: bool = False) -> None:
        """Read one input, and keep it where that fails."""
        try:
            with time_limit(LIMIT_S):
                target.attempt(data, refuse)
        except (Exception, Hang) as error:  # noqa: BLE001  # whatever it is, it is what is looked for
            self.count += 1
            kind = f"{target.name}: {type(error).__name__} at {_place(error)}"
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            if self.kinds[kind] == 1:
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"{target.name}-{len(list(self.folder.glob('*.input'))) + 1}"
                (self.folder / f"{name}.input").write_bytes(data)
                (self.folder / f"{name}.txt").write_text("".join(traceback.format_exception(error)))
                print(f"FAILED {kind}: {str(error)[:120]!r}; {self.folder / name}.input", flush=True)


def _place(error: BaseException) -> str:
    """The last line of ours that the error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/dspark_deploy/" in frame.filename or "/tuning/" in frame.filename]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def draw_inputs(target: Target, inputs: int, seed: int, failures: Failures) -> dict[str, Any]:
    """Inputs by mutation, as many as asked for."""
    draw = random.Random(f"{target.name} {seed}")
    started, before = time.monotonic(), failures.count
    for seeded in target.seeds:
        failures.attempt(target, seeded)
    typos = 0
    for _ in range(inputs - len(target.seeds)):
        data, refuse = target.draw(draw)
        typos += refuse
        failures.attempt(target, data, refuse)
    return {
        "inputs": inputs,
        "misspelt": typos,
        "seconds": round(time.monotonic() - started, 1),
        "failures": failures.count - before,
    }


def by_coverage(target: str, inputs: int, seed: int, folder: Path) -> dict[str, Any]:
    """Inputs by atheris, in a process of its own, since it instruments modules as they are imported."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        told = Path(place) / "told.json"
        child = [sys.executable, "-m", "bench.fuzz", "--atheris-child", str(told), "--only", target]
        child += ["--inputs", str(inputs), "--seed", str(seed), "--failures", str(folder)]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if not told.exists():
            raise SystemExit(f"atheris ended with {done.returncode} on {target}:\n{done.stderr[-2000:]}")
        count, failed = (int(part) for part in told.read_text().split())
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    kinds = [line.removeprefix("FAILED ") for line in lines]  # the first of each kind
    if count < inputs:
        failed += 1
        kinds.append(f"ended with {done.returncode} after {count} of {inputs}: {done.stderr[-300:]!r}")
    seconds = round(time.monotonic() - started, 1)
    return {"inputs": count, "seconds": seconds, "failures": failed, "kinds": kinds}


def atheris_child(options: argparse.Namespace) -> None:
    """One target under atheris. Its number of inputs and failures goes into a file as it runs."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from bench.fuzzing.targets import targets
    with tempfile.TemporaryDirectory() as place:
        (target,) = (each for each in targets(Path(place)) if each.name == options.only)
        corpus = Path(place) / "corpus"
        corpus.mkdir()
        for number, data in enumerate(target.seeds):
            (corpus / f"seed-{number}").write_bytes(data)
        failures = Failures(options.failures)
        counted = 0
        options.atheris_child.write_bytes(b" " * 64)
        with options.atheris_child.open("r+b") as file, mmap.mmap(file.fileno(), 64) as told:

            def one(data: bytes) -> None:
                nonlocal counted
                counted += 1
                failures.attempt(target, data)
                told[:] = f"{counted} {failures.count}".ljust(64).encode()

            longest = max(map(len, target.seeds)) * 2
            arguments = [f"-runs={options.inputs}", f"-seed={options.seed or 1}", f"-max_len={longest}"]
            arguments += ["-timeout=0", "-verbosity=0", "-print_final_stats=0", str(corpus)]
            atheris.Setup([sys.argv[0], *arguments], one, enable_python_coverage=True)
            atheris.Fuzz()  # ends the process


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All targets, and their sums."""
    from bench import cpu_case
    from bench.fuzzing.targets import targets

    failures = Failures(options.failures)
    found: dict[str, dict[str, Any]] = {}
    guided = 0.0 if importlib.util.find_spec("atheris") is None else options.atheris
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        only = options.only.split(",") if options.only else []
        chosen = [each for each in targets(Path(place)) if not only or each.name in only]
        shares, left = sum(each.share for each in chosen), options.inputs
        for target in chosen:
            target.check_seeds()
            inputs = round(left * target.share / shares)  # of what is left, so that the sum is exact
            left, shares = left - inputs, shares - target.share
            coverage = round(inputs * guided)
            ways = {"mutation": draw_inputs(target, inputs - coverage, options.seed, failures)}
            if coverage:
                ways["atheris"] = by_coverage(target.name, coverage, options.seed, options.failures)
            found[target.name] = ways
            print(target.name, json.dumps(ways), flush=True)
    parts = [part for each in found.values() for part in each.values()]
    sums = {key: sum(part.get(key, 0) for part in parts) for key in ("inputs", "misspelt", "failures")}
    machine = cpu_case.machine()
    libraries = ["pydantic", "PyYAML", "optuna", "prometheus-client", *(["atheris"] if guided else [])]
    versions = {name: importlib.metadata.version(name) for name in libraries}
    return {
        "origin": "in-process, readers of the product itself; no engine",
        **{key: machine[key] for key in ("machine", "python", "date")},
        "versions": versions,
        "seed": options.seed,
        "limit_s": LIMIT_S,
        **sums,
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "kinds": failures.kinds,
        "targets": found,
        "command": " ".join(["python -m bench.fuzz", *sys.argv[1:]]),
    }


def replay(options: argparse.Namespace) -> None:
    """One saved input again, its traceback shown."""
    from bench.fuzzing.targets import targets

    with tempfile.TemporaryDirectory() as place:
        (target,) = (each for each in targets(Path(place)) if each.name == options.only)
        with time_limit(LIMIT_S):
            target.attempt(options.replay.read_bytes(), refuse=False)
    print("a value, or an error of ours")


def main() -> None:
    """Fuzz, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=20_000, help="of all targets together")
    parser.add_argument("--atheris", type=float, default=0.1, help="share of them that atheris draws")
    parser.add_argument("--only", help="targets, by name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=Path, default=Path("runs/fuzz"), help="where failing inputs go")
    parser.add_argument("--place", type=Path, default=MEMORY, help="where inputs are written")
    parser.add_argument("--out", type=Path, help="write the document here as well")
    parser.add_argument("--replay", type=Path, help="an input that failed")
    parser.add_argument("--atheris-child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.atheris_child:
        atheris_child(options)
    if options.replay:
        replay(options)
        return
    document = run(options)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "targets"}))
    sys.exit(1 if document["failures"] else 0)


if __name__ == "__main__":
    main()
