"""vLLM's own kernel objects, as a ROCm build makes them, under the patch that replaces the wrong ones.

How a kernel object hides its function differs between versions: a decorated object, a closure, a deferred
one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.simt.generate import ROOT
from tests.support import sources

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import json, sys
from pathlib import Path
from dspark_deploy.plugin import wave64
from tests.support import upstream
upstream.install(Path(sys.argv[1]), "rocm")
module = upstream.kernels()
if "unread" in sys.argv:  # as if no kernel's text were understood: what TileLang generates decides
    def reductions(function):
        raise wave64.NotUnderstoodError("other words")
    wave64.thread_groups.reductions = reductions
    wave64.EXAMINED = wave64.EXAMINED[:1]
patch = wave64.patch(module, "warn", "auto")
verdict = patch.examine()
if verdict.state is None:
    patch.install()
kinds = {name: type(getattr(module, name)).__name__ for name in wave64.EXAMINED}
print(json.dumps({"state": verdict.state, "reason": verdict.reason, "kinds": kinds}))
"""


def examined(version: str, *options: str) -> dict[str, dict[str, str]]:
    """The patch's verdict on a version's kernels, and what is under their names afterwards."""
    path = os.pathsep.join([str(sources.tilelang_site()), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(sources.vllm_sources(version)), *options],
        env=dict(os.environ) | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.30.0"])
def test_the_two_wrong_kernels_are_replaced(version: str) -> None:
    found = examined(version)
    assert found["state"] is None, found
    kinds = list(found["kinds"].values())
    assert kinds[:2] == ["TwoLaunches", "TwoLaunches"] and kinds[2] != "TwoLaunches", found


def test_the_fixed_ones_stay() -> None:
    found = examined("0.33.0")
    assert found["state"] == "upstream", found
    assert "TwoLaunches" not in found["kinds"].values()


@pytest.mark.parametrize(("version", "state"), [("0.30.0", None), ("0.33.0", "upstream")])
def test_where_the_text_is_not_understood_the_generated_source_decides(
    version: str, state: str | None
) -> None:
    found = examined(version, "unread")
    assert found["state"] == state and found["kinds"], found
    assert ("TwoLaunches" in found["kinds"].values()) == (state is None), found
