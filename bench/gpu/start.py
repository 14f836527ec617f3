"""What each measurement on a GPU does first: is all there, what was typed, on which machine.

Not covered: whether the GPU is this measurement's alone, which the person who starts it must see to.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

NO_GPU = 3  # as dspark-serve, whose preflight refuses a machine


def require(program: str, vllm: bool = True) -> None:
    """End here, by name, without a CUDA GPU or vLLM; and end with our children when we are asked to."""
    if not torch.cuda.is_available():
        _refuse(program, "this machine shows no CUDA GPU to torch; run it where one is")
    if vllm and importlib.util.find_spec("vllm") is None:
        _refuse(program, "vLLM can't be imported; put its folder on PYTHONPATH, or install it")
    # SystemExit unwinds through subprocess.run and `with`, which kill and wait for what they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _refuse(program: str, why: str) -> NoReturn:
    print(f"{program}: {why}", file=sys.stderr)
    sys.exit(NO_GPU)


def typed(program: str) -> str:
    """The command as it was typed; of a path from the root, its last part."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", program, *words])


def machine() -> dict[str, Any]:
    """The machine of a document. `host` tells two machines apart and names neither."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / (1 << 30), 1),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.partition("\n")[0].strip() or "unknown"


def heading(program: str) -> dict[str, Any]:
    """Command, date and machine: how every document here begins."""
    return {"command": typed(program), "date": time.strftime("%Y-%m-%d"), "machine": machine()}


def conclude(program: str, failed: int) -> None:
    """Exit code 1 where rows failed, whose last words are in the document."""
    if failed:
        print(f"{program}: {failed} rows failed; the document has why", file=sys.stderr)
        sys.exit(1)
