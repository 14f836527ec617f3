"""On CUDA nothing is replaced: the names stay upstream's kernels, and their source is the same byte for byte.

Two processes load vLLM's kernels as on CUDA, one of them with the plugin's hooks run before, and generate the
CUDA source of a kernel that is replaced on ROCm. No GPU is needed for that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark_deploy.plugin.settings import SETTINGS_ENV, Settings
from tests.simt import matrix
from tests.simt.generate import ROOT
from tests.support import sources

pytestmark = pytest.mark.timeout(600)

PROGRAM = """
import hashlib, json, sys
from pathlib import Path
from dspark_deploy.plugin import general_hook, platform_hook
from tests.simt import cases, generate, matrix
from tests.support import upstream
upstream.install(Path(sys.argv[1]), "cuda")
platform_hook(); general_hook()
import tilelang
module = upstream.kernels()
job = matrix.upstream(sys.argv[2], "pre_with_norm", "sm_90", 1024)
found = {
    "origins": {name: type(getattr(module, name)).__module__ for name in cases.UPSTREAM.values()},
    "text": generate.lowered(job).kernel_source,
}
found["plugin"] = sorted(name for name in sys.modules if name.startswith("dspark_deploy.plugin."))
print(json.dumps(found))
"""


def started(version: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """A process that says, per name, where the class of its object is from, and gives the CUDA source."""
    path = os.pathsep.join([str(sources.tilelang_site()), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(sources.vllm_sources(version)), version],
        env=dict(os.environ) | {"PYTHONPATH": path, "TILELANG_DISABLE_CACHE": "1"} | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it found."""
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


def test_kernels_and_their_source_are_upstreams(tmp_path: Path) -> None:
    """0.27.1, whose kernels are the ones that are replaced on ROCm."""
    settings = tmp_path / "settings.json"
    Settings("cuda", tmp_path / "processes").write(settings)
    processes = [started(matrix.WRONG, each) for each in ({}, {SETTINGS_ENV: str(settings)})]
    without, inside = map(answer, processes)
    assert "dspark_deploy.plugin.process" in inside["plugin"], "the hooks did run"
    assert "dspark_deploy.plugin.process" not in without["plugin"]
    assert all(origin.startswith("tilelang.") for origin in inside["origins"].values()), inside["origins"]
    assert "__global__" in inside["text"] and inside["text"] == without["text"]
    (report,) = (tmp_path / "processes").glob("*.json")
    assert [patch["name"] for patch in json.loads(report.read_text())["patches"]] == [
        "numerics-watch",
        "resolved-watch",
        "graph-breaks-watch",
    ]
