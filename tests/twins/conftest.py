"""Lets vLLM's kernels run in Triton's interpreter in this process, as the platform hook does in an engine.

    pytest tests/twins

The variable must be set before Triton is imported, so nothing collected before these tests may import torch.
"""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("triton") is None:
    collect_ignore_glob.append("test_*.py")
else:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    from dspark_deploy.plugin.cpu_engine import triton_interpreter
    from dspark_deploy.plugin.registry import Registry

    Registry().apply(triton_interpreter.patches())

    import triton.language as tl

    if not type(tl.zeros_like).__name__.startswith("Interpreted"):
        raise RuntimeError("Triton was imported before tests/twins could ask for its interpreter")

    import vllm.v1.worker.cpu.shm  # noqa: F401  (vLLM's CPU stand-ins come before its runner's modules)
