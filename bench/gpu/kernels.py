"""mHC pre and post on one CUDA GPU: our two launches, vLLM's TileLang kernels and torch, in a CUDA graph.

    PYTHONPATH=VLLM_SOURCES:TILELANG_SITE python -m bench.gpu.kernels --out bench/results/gpu_kernels.json

Needs TileLang and the Python sources of a vLLM on PYTHONPATH; vLLM's compiled extensions aren't used. Each
case is 20 calls in one CUDA graph; the time is the median over replays, divided by 20. The floor is the bytes
that must move, at the copy bandwidth of the same run. NRMSE is against fp64. A kernel that fails is a row
with its reason.

One process per hidden size compiles, all at once; a file lock lets one of them measure at a time. Not
covered: the projection in front of mHC pre, which is a GEMM of its own, and cold caches: the data of small
cases stays in L2.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import start
from dspark_deploy.kernels import mhc_pre
from tests.support import upstream

HIDDEN = (4096, 5120, 7168)
TOKENS = (1, 2, 5, 8, 16, 40, 64, 160, 640, 1024)
SPLITS = (1, 8)
ALONE = (1, 64, 1024)
CALLS, REPLAYS = 20, 30
CHILD_SECONDS = 420
CONSTANTS = mhc_pre.Constants()
HC, MIXES = mhc_pre.HC, mhc_pre.MIXES
PROGRAM = "bench.gpu.kernels"


def attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """The result of `work`, or None and why it failed, whatever it raised."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        error = future.exception()
    return (None, f"{type(error).__name__}: {error}"[:600]) if error else (future.result(), "")


def graph_microseconds(call: Callable[[], Any]) -> float:
    """Median microseconds of one call, out of `CALLS` in one CUDA graph, over `REPLAYS` replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy of 1 GiB, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (graph_microseconds(lambda: target.copy_(source)) * 1e-6)


def nrmse(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square error over root mean square of the reference. NaN propagates."""
    return float((got.double() - want).norm() / want.norm())


class Case:
    """The tensors of one (hidden, tokens, n_splits), and the fp64 results."""

    def __init__(self, hidden: int, tokens: int, n_splits: int, device: str = "cuda") -> None:
        torch.manual_seed(hidden + tokens)
        f32 = {"device": device, "dtype": torch.float32}
        bf16 = {"device": device, "dtype": torch.bfloat16}
        self.hidden, self.tokens, self.n_splits = hidden, tokens, n_splits
        self.residual = torch.randn(tokens, HC, hidden, **bf16)
        fn = torch.randn(MIXES, HC * hidden, **f32) / (HC * hidden) ** 0.5
        x = self.residual.flatten(1).float()
        parts = [slice(s * x.shape[1] // n_splits, (s + 1) * x.shape[1] // n_splits) for s in range(n_splits)]
        self.gemm_mul = torch.stack([x[:, p] @ fn[:, p].t() for p in parts]).contiguous()
        self.gemm_sqrsum = torch.stack([x[:, p].square().sum(-1) for p in parts]).contiguous()
        self.scale = torch.rand(3, **f32) + 0.5
        self.base = torch.randn(MIXES, **f32)
        self.weight = (1 + 0.2 * torch.randn(hidden, **f32)).to(torch.bfloat16)
        self.pre, self.post = torch.empty(tokens, HC, **f32), torch.empty(tokens, HC, **f32)
        self.comb = torch.empty(tokens, HC * HC, **f32)
        self.layer_input = torch.empty(tokens, hidden, **bf16)
        self.x = torch.randn(tokens, hidden, **bf16)
        self.residual_out = torch.empty_like(self.residual)
        self.mixed = mhc_pre.mix_ref(
            self.gemm_mul.double(),
            self.gemm_sqrsum.double(),
            self.scale.double(),
            self.base.double(),
            CONSTANTS,
            HC * hidden,
        )
        self.post_in, self.comb_in = self.mixed.post.float(), self.mixed.comb.float().contiguous()

    def pre_reference(self, with_norm: bool) -> torch.Tensor:
        weight = self.weight.double() if with_norm else None
        return mhc_pre.collapse_ref(self.mixed.pre, self.residual.double(), weight, CONSTANTS.norm_eps)

    def post_reference(self) -> torch.Tensor:
        mixed = torch.einsum("tij,tih->tjh", self.comb_in.double(), self.residual.double())
        return mixed + self.post_in.double()[:, :, None] * self.x.double()[:, None]

    def poison(self) -> None:
        """NaN in every output, so that a kernel that writes nothing can't pass."""
        for tensor in (self.pre, self.post, self.comb, self.layer_input, self.residual_out):
            tensor.fill_(float("nan"))


# Kernel name -> elaboration: what gives its TIR and pass configuration.
Elaborated = tuple[Any, Any]


def elaborations(hidden: int) -> dict[str, Callable[[], Elaborated]]:
    """Every kernel of one hidden size, to be elaborated one after another: the builder isn't reentrant.

    On the CPU, since the GPU may be measuring another hidden size meanwhile.
    """
    from dspark_deploy.kernels import mhc_pre_tilelang

    module = upstream.kernels()
    work: dict[str, Callable[[], Elaborated]] = {}
    eps = {
        "rms_eps": CONSTANTS.rms_eps,
        "hc_pre_eps": CONSTANTS.pre_eps,
        "hc_sinkhorn_eps": CONSTANTS.sinkhorn_eps,
        "hc_post_mult_value": CONSTANTS.post_mult,
        "sinkhorn_repeat": CONSTANTS.sinkhorn_repeat,
    }

    def theirs(name: str, arguments: Callable[[], list[torch.Tensor]], **params: Any) -> Elaborated:
        jit = upstream.jit_function(getattr(module, name))
        return jit.get_tir(*arguments(), **params), jit.pass_configs

    for n in SPLITS:
        for norm in (False, True):
            work[f"vllm pre norm={norm} splits={n}"] = lambda n=n, norm=norm: theirs(
                "mhc_pre_big_fuse_with_norm_tilelang" if norm else "mhc_pre_big_fuse_tilelang",
                lambda: upstream_pre_arguments(module, Case(hidden, 1, n, "cpu"), norm),
                hidden_size=hidden,
                n_splits=n,
                **eps,
                **({"norm_eps": CONSTANTS.norm_eps} if norm else {}),
            )
    work["vllm post"] = lambda: theirs(
        "mhc_post_tilelang", lambda: post_arguments(Case(hidden, 1, 1, "cpu")), hc=HC, hidden=hidden
    )
    for pdl in (False, True):
        for n in SPLITS:
            work[f"mix splits={n} pdl={pdl}"] = lambda n=n, pdl=pdl: (
                mhc_pre_tilelang.mix(**mhc_pre.mix_parameters(n, HC * hidden, CONSTANTS, pdl=pdl)),
                mhc_pre_tilelang.PASS_CONFIGS,
            )
        for norm in (False, True):
            work[f"collapse norm={norm} pdl={pdl}"] = lambda norm=norm, pdl=pdl: (
                mhc_pre_tilelang.collapse(
                    **mhc_pre.collapse_parameters(
                        hidden, CONSTANTS.norm_eps if norm else None, mhc_pre.plan(hidden, norm), pdl=pdl
                    )
                ),
                mhc_pre_tilelang.PASS_CONFIGS,
            )
    return work


def upstream_pre_arguments(module: Any, case: Case, norm: bool) -> list[torch.Tensor]:
    """vLLM's order: coefficients in, residual, outputs, norm weight, and what 0.30 and later added."""
    kernel = upstream.jit_function(
        module.mhc_pre_big_fuse_with_norm_tilelang if norm else module.mhc_pre_big_fuse_tilelang
    )
    arguments = [case.gemm_mul, case.gemm_sqrsum, case.scale, case.base, case.residual]
    arguments += [case.post, case.comb, case.layer_input] + ([case.weight] if norm else [])
    if "pre_mix_in" in kernel.signature.parameters:
        # None of the three is touched with the options off; shapes and dtypes must fit.
        arguments += [case.post, case.post, case.layer_input]
    return arguments


def post_arguments(case: Case) -> list[torch.Tensor]:
    return [case.comb_in, case.residual, case.post_in, case.x, case.residual_out]


class Measuring:
    """Rows of one hidden size. An arm whose kernel is missing, or fails, is a row with its reason."""

    def __init__(
        self, hidden: int, bandwidth: float, kernels: dict[str, Any], failures: dict[str, str]
    ) -> None:
        self.hidden, self.bandwidth, self.kernels, self.failures = hidden, bandwidth, kernels, failures
        self.rows: list[dict[str, Any]] = []

    def launch(self, *launches: tuple[str, list[torch.Tensor]]) -> None:
        """Launch kernels by name, one after another."""
        for name, arguments in launches:
            self.kernels[name](*arguments)

    def arm(
        self,
        case: Case,
        op: str,
        name: str,
        needs: list[str],
        call: Callable[[], Any],
        check: Callable[[Any], Any],
    ) -> None:
        """Measure `call` as arm `name` of `op`; `check` gives the NRMSE of its outputs."""
        moved = case.tokens * self.hidden * 2 * (9 if op == "post" else 5)
        row = {
            "op": op,
            "hidden": self.hidden,
            "tokens": case.tokens,
            "n_splits": case.n_splits,
            "arm": name,
            "floor_us": round(moved / self.bandwidth * 1e6, 3),
        }
        missing = [self.failures.get(need, "was not compiled") for need in needs if need not in self.kernels]
        if missing:
            self.rows.append(row | {"error": missing[0]})
            return

        def timed() -> dict[str, Any]:
            case.poison()
            result = call()
            torch.cuda.synchronize()
            return {"nrmse": check(result), "us": round(graph_microseconds(call), 3)}

        values, error = attempt(timed)
        self.rows.append(row | (values or {"error": error}))

    def pre(self, case: Case, norm: bool) -> None:
        """vLLM's single launch, our two, with and without programmatic dependent launch, and torch."""
        op = "pre with norm" if norm else "pre"
        want, wanted = case.pre_reference(norm), case.mixed

        def check(result: Any) -> dict[str, float]:
            out, post, comb = result or (case.layer_input, case.post, case.comb)
            return {
                "layer_input": nrmse(out, want),
                "post": nrmse(post, wanted.post),
                "comb": nrmse(comb.view_as(wanted.comb), wanted.comb),
            }

        def twin() -> Any:
            given = (case.gemm_mul, case.gemm_sqrsum, case.scale, case.base)
            mixed = mhc_pre.mix_ref(*given, CONSTANTS, HC * self.hidden)
            weight = case.weight.float() if norm else None
            out = mhc_pre.collapse_ref(mixed.pre, case.residual.float(), weight, CONSTANTS.norm_eps)
            return out.to(torch.bfloat16), mixed.post, mixed.comb

        theirs = f"vllm pre norm={norm} splits={case.n_splits}"
        single = (theirs, upstream_pre_arguments(upstream.kernels(), case, norm))
        self.arm(case, op, "vllm", [theirs], partial(self.launch, single), check)
        for pdl in (False, True):
            name = "ours, pdl" if pdl else "ours"
            mix, collapse = f"mix splits={case.n_splits} pdl={pdl}", f"collapse norm={norm} pdl={pdl}"
            coefficients = [case.gemm_mul, case.gemm_sqrsum, case.scale, case.base]
            first = (mix, [*coefficients, case.pre, case.post, case.comb])
            second = (
                collapse,
                [case.pre, case.residual, case.weight, case.layer_input, case.layer_input],
            )
            self.arm(case, op, name, [mix, collapse], partial(self.launch, first, second), check)
            if case.tokens in ALONE:
                # Where the time of a pair goes: each half on its own, unchecked since the other is missing.
                for half, part in (("mix", first), ("collapse", second)):
                    self.arm(
                        case, f"{op}: {half}", name, [part[0]], partial(self.launch, part), lambda _: None
                    )
        self.arm(case, op, "torch", [], twin, check)

    def post(self, case: Case) -> None:
        """vLLM's TileLang kernel and its torch reference."""
        want = case.post_reference()
        given = (case.x, case.residual, case.post_in[..., None], case.comb_in)

        def check(result: Any) -> dict[str, float]:
            return {"residual": nrmse(case.residual_out if result is None else result, want)}

        kernel = ("vllm post", post_arguments(case))
        self.arm(case, "post", "vllm", ["vllm post"], partial(self.launch, kernel), check)
        self.arm(case, "post", "torch", [], partial(upstream.references().mhc_post_torch, *given), check)

    def run(self) -> None:
        """Every token count."""
        for tokens in TOKENS:
            for n_splits in SPLITS:
                case = Case(self.hidden, tokens, n_splits)
                self.pre(case, norm=False)
                self.pre(case, norm=True)
            self.post(Case(self.hidden, tokens, 1))
            print(f"hidden {self.hidden}, tokens {tokens}: {len(self.rows)} rows", flush=True)


def child(hidden: int, lock: Path, out: Path) -> None:
    """Compile the kernels of one hidden size, then measure them while holding `lock`."""
    import tilelang

    started = time.monotonic()
    kernels: dict[str, Any] = {}
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(8) as pool:
        futures = {}
        for name, elaborate in elaborations(hidden).items():
            elaborated, failures_reason = attempt(elaborate)
            if elaborated is None:
                failures[name] = failures_reason
                continue
            futures[name] = pool.submit(tilelang.compile, elaborated[0], pass_configs=elaborated[1])
        for name, future in futures.items():
            error = future.exception()
            if error:
                failures[name] = f"{type(error).__name__}: {error}"[:600]
            else:
                kernels[name] = future.result()
    compiled = time.monotonic() - started
    print(
        f"hidden {hidden}: {len(kernels)} kernels in {compiled:.0f} s, failed: {failures or 'none'}",
        flush=True,
    )
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        bandwidth = copy_bandwidth()
        measuring = Measuring(hidden, bandwidth, kernels, failures)
        measuring.run()
    document = {"bandwidth": bandwidth, "compile_s": round(compiled, 1), "failures": failures}
    document["rows"] = measuring.rows
    out.write_text(json.dumps(document))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per op, hidden, tokens and n_splits; times in microseconds."""
    arms = ("vllm", "ours", "ours, pdl", "torch")
    lines = [
        "| op | hidden | tokens | splits | " + " | ".join(arms) + " | ours / vllm | floor |",
        "|---" * 10 + "|",
    ]
    cells: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        key = (row["op"], row["hidden"], row["tokens"], row["n_splits"])
        cells.setdefault(key, {"floor": row["floor_us"]})[row["arm"]] = row.get("us")
    for key, cell in sorted(cells.items()):
        times = [cell.get(arm) for arm in arms]
        ours = min((t for t in times[1:3] if t), default=None)
        ratio = f"{ours / times[0]:.2f}" if ours and times[0] else ""
        shown = [f"{t:.2f}" if t else "" for t in times]
        lines.append("| " + " | ".join([*map(str, key), *shown, ratio, f"{cell['floor']:.2f}"]) + " |")
    return "\n".join(lines)


def version(distribution: str) -> str:
    """The version of what would be imported, by the metadata beside it, or what stands in for it.

    Another version's metadata may lie further back on the path.
    """
    spec = importlib.util.find_spec(distribution)
    folder = Path(spec.origin).resolve().parents[1] if spec and spec.origin else None
    for found in importlib.metadata.distributions(name=distribution):
        if Path(str(found.locate_file(""))).resolve() == folder:
            return found.version
    return "sources without metadata"


def main() -> None:
    """Run one child per hidden size and write one document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    start.require(PROGRAM)
    if arguments.hidden:
        spec = importlib.util.find_spec("vllm")
        assert spec is not None and spec.submodule_search_locations, "vllm has no folder"
        major, _ = torch.cuda.get_device_capability()
        upstream.install(Path(spec.submodule_search_locations[0]).parent, "cuda", pdl=major >= 9)
        child(arguments.hidden, arguments.lock, arguments.out)
        return

    document: dict[str, Any] = {
        **start.heading(PROGRAM),
        "versions": {name: version(name) for name in ("torch", "tilelang", "vllm")},
        "method": f"{CALLS} calls in one CUDA graph, median of {REPLAYS} replays, microseconds a call",
        "hidden": {},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "gpu"
        children = {
            hidden: subprocess.Popen(
                [
                    *(sys.executable, "-m", "bench.gpu.kernels", "--out", f"{folder}/{hidden}.json"),
                    *("--hidden", str(hidden), "--lock", str(lock)),
                ]
            )
            for hidden in HIDDEN
        }
        try:
            _gather(children, Path(folder), document, arguments.out)
        finally:
            for process in children.values():
                process.kill()
    print(table(document["rows"]))
    for row in document["rows"]:
        if "error" in row:
            print(f"failed: {row['op']} {row['hidden']} {row['tokens']} {row['arm']}: {row['error'][:160]}")
    failed = [each for each in [*document["rows"], *document["hidden"].values()] if "error" in each]
    start.conclude(PROGRAM, len(failed))


def _gather(
    children: dict[int, subprocess.Popen[bytes]], folder: Path, document: dict[str, Any], out: Path
) -> None:
    """Each child's rows, as they end; the document is written after each."""
    deadline = time.monotonic() + CHILD_SECONDS
    for hidden, process in children.items():
        try:
            code: int | str = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"killed after {CHILD_SECONDS} s"
        result = folder / f"{hidden}.json"
        if result.exists():
            found = json.loads(result.read_text())
            document["rows"] += found.pop("rows")
            document["hidden"][hidden] = found
        else:
            document["hidden"][hidden] = {"error": f"its process gave no result: {code}"}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
