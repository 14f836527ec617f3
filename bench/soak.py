"""An hour of serve and sweep: are memory, descriptors, threads and disk flat?

    python -m bench.soak --seconds 3600 --out bench/results/soak.json
    python -m bench.soak --seconds 3600 --yield-to LOCK       stand still while LOCK is held exclusively

Beside one another, for as long as `--seconds` says:

    serve      `dspark-serve` on the CPU engine, a request every two seconds and a look at its metrics
    sweeper    one process that sweeps over and over, with a stand-in engine of fixed cost
    sweeps     `dspark-tune sweep` on the CPU engine, every 20 minutes, whole: boot, load, accuracy, end

Every ten seconds each process of the first two is asked for its memory, descriptors and threads, and the disk
for the bytes below the run directories. After a warm-up of ten minutes a line is fitted (Theil and Sen), and
its growth in an hour is held against LIMITS; beyond them the exit code is 1. Time is counted while this
process runs: one that was stopped, by a signal or by `--yield-to`, goes on where it was.

The engine's log grows by a line or two for each request, as vLLM's own access log does; it is judged by bytes
per request, apart from all other files. Not covered: a GPU's memory, and anything that needs days to show.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from scipy import stats

from bench import cpu_case
from dspark_deploy.tiny import language
from tests.engine.served import served
from tests.support.stand_in import StandIn
from tests.support.sweeps import make
from tuning.acceptance import parse_metrics
from tuning.conclusion import conclude

SAMPLE_S, REQUEST_S, SWEEP_S, WARM_UP_S = 10.0, 2.0, 1200.0, 600.0
STAND_IN_S = 1.0
MIB = 1 << 20
# Growth in an hour, at most; the log's is by request.
LIMITS = {"anonymous_mib": 8.0, "descriptors": 1.0, "threads": 1.0, "disk_mib": 0.1}
LOG_BYTES_PER_REQUEST = 400
SWEEP = ["sweep", "--profile", "cpu-tiny.yaml", "--num-speculative-tokens", "none,3", "--loads", "1"]
SWEEP += ["--draft-sample-method", "greedy", "--prompts-per-load", "8", "--accuracy-problems", "40"]
SWEEP += ["--boots", "0", "--no-report", "--json"]


class Clock:
    """Seconds that this process ran: a step of over `most` is a time in which it was stopped."""

    def __init__(self, most: float = 5.0) -> None:
        self.running, self.stopped, self._most, self._last = 0.0, 0.0, most, time.monotonic()

    def tick(self) -> float:
        """Call it often. Returns the running seconds."""
        now = time.monotonic()
        step, self._last = now - self._last, now
        if step > self._most:
            self.stopped += step
        else:
            self.running += step
        return self.running


def sweep_forever(folder: Path) -> None:
    """Sweep with a stand-in engine until killed; `sweeps` in the folder counts them."""
    for number in range(1_000_000):
        place = folder / f"{number}"
        place.mkdir()
        campaign = make(place, StandIn(cost_s=STAND_IN_S))
        campaign.run()
        conclude(campaign, report=True)
        campaign.opened.storage.remove_session()  # type: ignore[attr-defined]
        shutil.rmtree(place)
        (folder / "sweeps").write_text(f"{number + 1}")


def look(root: psutil.Process) -> dict[str, float]:
    """Memory, descriptors and threads of a process and all below it."""
    found = dict.fromkeys(("anonymous_mib", "uss_mib", "rss_mib", "descriptors", "threads"), 0.0)
    for process in [root, *root.children(recursive=True)]:
        memory = process.memory_full_info()
        found["anonymous_mib"] += anonymous(process.pid) / MIB
        found["uss_mib"] += memory.uss / MIB
        found["rss_mib"] += memory.rss / MIB
        found["descriptors"] += process.num_fds()
        found["threads"] += process.num_threads()
    return found


def anonymous(pid: int) -> int:
    """Bytes of memory that no file is behind. 0 for a process that has ended.

    Other measures move by what else runs: a page of a library is unique to a process (USS) until another maps
    it, and is divided between them then (PSS).
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def size(folder: Path, log: bool) -> int:
    """Bytes of the engine's log below the folder, or of everything else."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the sweeper clears up after itself
            if path.is_file() and (path.name == "engine.log") == log:
                total += path.stat().st_size
    return total


def held(lock: Path | None) -> bool:
    """Whether somebody has the lock exclusively."""
    if lock is None:
        return False
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stand_still(lock: Path | None) -> bool:
    """Stop every process below this one while the lock is held. Whether that was so."""
    if not held(lock):
        return False
    family = psutil.Process().children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    while held(lock):
        time.sleep(1)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    return True


@contextlib.contextmanager
def child(*arguments: str, cwd: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python command, killed at the end if it is still there."""
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, *arguments], cwd=cwd, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def judge(times: list[float], rows: list[dict[str, float]]) -> dict[str, Any]:
    """Growth by quantity: of the line through what came after the warm-up, in an hour, against its limit."""
    after = [i for i, moment in enumerate(times) if moment >= min(WARM_UP_S, times[-1] / 3)]
    found: dict[str, Any] = {}
    for name, limit in LIMITS.items():
        if name not in rows[0]:
            continue
        values = np.array([rows[i][name] for i in after])
        slope, _, low, high = stats.theilslopes(values, np.array([times[i] for i in after]) / 3600)
        found[name] = {
            "first": round(float(values[0]), 2),
            "last": round(float(values[-1]), 2),
            "least": round(float(values.min()), 2),
            "most": round(float(values.max()), 2),
            "growth_per_hour": round(float(slope), 3),
            "interval": [round(float(low), 3), round(float(high), 3)],
            "limit": limit,
            "flat": bool(slope <= limit),
        }
    return found


def soak(seconds: float, lock: Path | None, folder: Path) -> dict[str, Any]:
    """Run everything, and judge it."""
    repository = Path(__file__).parent.parent
    times: list[float] = []
    rows: dict[str, list[dict[str, float]]] = {"serve": [], "sweeper": []}
    sweeps: list[dict[str, Any]] = []
    requests = failures = pauses = 0
    log_sizes: list[tuple[int, int]] = []
    sweeper_folder = folder / "sweeper"
    sweeper_folder.mkdir()
    prompts = [language.prompt(p) for p in language.problems(language.LOAD_SEEDS[0], 500)]
    with contextlib.ExitStack() as stack:
        # Whole answers only: a client that gives up is no light load.
        server = stack.enter_context(served(folder, "--run-dir", str(folder / "runs")))
        client = stack.enter_context(httpx.Client(base_url=server.ready["url"], timeout=600))
        sweeping = ["-m", "bench.soak", "--sweeper", str(sweeper_folder)]
        log = folder / "sweeper.log"
        sweeper = stack.enter_context(child(*sweeping, cwd=repository, log=log))
        roots = {"serve": psutil.Process(server.process.pid), "sweeper": psutil.Process(sweeper.pid)}
        real: subprocess.Popen[bytes] | None = None
        next_sample, next_sweep, began = SAMPLE_S, min(SWEEP_S / 2, seconds / 3), (0.0, 0)
        clock = Clock()
        while clock.tick() < seconds:
            if stand_still(lock):
                pauses += 1
                clock.tick()
            body = {"model": "tiny", "max_tokens": 96, "temperature": 0}
            answer = client.post("/v1/completions", json=body | {"prompt": prompts[requests % len(prompts)]})
            requests += 1
            failures += answer.status_code != 200 or not answer.json()["choices"][0]["text"]
            clock.tick()
            if clock.running >= next_sample:
                parse_metrics(client.get("/metrics").text)
                next_sample = clock.running + SAMPLE_S
                times.append(round(clock.running, 1))
                for name, root in roots.items():
                    rows[name].append(look(root))
                rows["serve"][-1]["disk_mib"] = size(folder / "runs", log=False) / MIB
                log_sizes.append((requests, size(folder / "runs", log=True)))
            if real is not None and real.poll() is not None:
                took = clock.running - began[0]
                sweeps.append(
                    {
                        "exit_code": real.returncode,
                        "running_seconds": round(took),
                        "paused_meanwhile": pauses > began[1],
                    }
                )
                shutil.rmtree(folder / "real")
                real, next_sweep = None, began[0] + SWEEP_S
            if real is None and next_sweep <= clock.running < seconds - 240:
                began = (clock.running, pauses)
                command = [
                    "-c",
                    "from tuning.sweep import main; main()",
                    *SWEEP,
                    "--out",
                    str(folder / "real"),
                ]
                real = stack.enter_context(child(*command, cwd=folder, log=folder / "real.log"))
            time.sleep(REQUEST_S)
        if real is not None:
            real.wait(300)
            sweeps.append({"exit_code": real.returncode, "running_seconds": round(clock.running - began[0])})
        swept = int((sweeper_folder / "sweeps").read_text())
        family = server.family()
        code = server.end()
        _, alive = psutil.wait_procs(family, 10)
    (asked, small), (asked_last, large) = log_sizes[len(log_sizes) // 6], log_sizes[-1]
    per_request = (large - small) / max(asked_last - asked, 1)
    judged = {name: judge(times, each) for name, each in rows.items()}
    flat = all(each["flat"] for part in judged.values() for each in part.values())
    good = all(each["exit_code"] in (0, 7) or each.get("paused_meanwhile") for each in sweeps)
    return {
        "origin": "CPU engine; the sweeper's engine is a stand-in of fixed cost",
        "running_seconds": round(clock.running),
        "stopped_seconds": round(clock.stopped),
        "pauses": pauses,
        "requests": requests,
        "failed_requests": failures,
        "stand_in_sweeps": swept,
        "engine_sweeps": sweeps,
        "exit_code_of_serve": code,
        "processes_left": len(alive),
        "log_bytes_per_request": round(per_request),
        "log_bytes_per_request_limit": LOG_BYTES_PER_REQUEST,
        "warm_up_seconds": WARM_UP_S,
        "growth": judged,
        "flat": bool(flat and per_request <= LOG_BYTES_PER_REQUEST),
        "good": bool(flat and good and not failures and not alive and code == 130),
        "samples": {"seconds": times}
        | {
            name: {key: [round(row[key], 2) for row in each] for key in each[0]}
            for name, each in rows.items()
        },
    }


def main() -> None:
    """Soak, or sweep for the soak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--yield-to", type=Path, metavar="LOCK", help="stand still while it is held")
    parser.add_argument("--out", type=Path, help="write the document here as well")
    parser.add_argument("--sweeper", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sweeper:
        sweep_forever(options.sweeper)
    with tempfile.TemporaryDirectory() as folder:
        document = soak(options.seconds, options.yield_to, Path(folder)) | cpu_case.machine()
        document["command"] = " ".join(["python -m bench.soak", "--seconds", f"{options.seconds:g}"])
    if options.out:
        options.out.write_text(json.dumps(document) + "\n")
    print(json.dumps({name: value for name, value in document.items() if name != "samples"}))
    sys.exit(0 if document["good"] and document["flat"] else 1)


if __name__ == "__main__":
    main()
