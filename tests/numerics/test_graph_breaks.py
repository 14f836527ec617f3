"""A breakable graph without a break is refused: vLLM's own wrapper and marks, CUDA's graphs stood in for.

What an H200 gave for such graphs is in `bench/results/gpu_v4_graphs.json`. Not covered: a real capture.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from dspark_deploy.plugin import graph_breaks  # noqa: E402
from dspark_deploy.plugin.registry import State  # noqa: E402

VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


class Graph:
    """What vLLM asks of a torch.cuda.CUDAGraph."""

    def capture_begin(self, **_: Any) -> None:
        """Begin nothing."""

    def capture_end(self) -> None:
        """End it."""

    def replay(self) -> None:
        """Do nothing again."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """vLLM's module, patched, with graphs that capture nothing."""
    loaded = importlib.import_module(graph_breaks.MODULE)
    wrapper = loaded.BreakableCUDAGraphWrapper
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(loaded, "validate_cudagraph_capturing_enabled", lambda: None)
    monkeypatch.setattr(loaded, "weak_ref_tensors", lambda output: output)
    monkeypatch.setattr(loaded.gc, "isenabled", lambda: False)
    monkeypatch.setattr(loaded, "capture_pool", lambda *_: contextlib.nullcontext(None))
    monkeypatch.setattr(wrapper, "_capture", wrapper._capture)  # what is installed below is taken back
    patch = graph_breaks.patch(loaded)
    assert patch.examine().state is None, patch.examine().reason
    patch.install()
    yield loaded


def capture(module: Any, monkeypatch: pytest.MonkeyPatch, mode: str, marked_late: bool) -> Any:
    """Capture a model of one attention, marked before or after the variable is set."""
    monkeypatch.setenv(VARIABLE, "0" if marked_late else "1")
    attention = module.eager_break_during_capture(lambda _: None)
    monkeypatch.setenv(VARIABLE, "1")
    context = SimpleNamespace(cudagraph_runtime_mode=module.CUDAGraphMode[mode])
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
    wrapper = object.__new__(module.BreakableCUDAGraphWrapper)
    vars(wrapper).update(
        runnable=lambda: attention(None), vllm_config=None, graph_pool=None, is_debugging_mode=False
    )
    entry = module._BreakableEntry(SimpleNamespace(num_tokens=48))
    wrapper._capture(entry, (), {})
    return entry


def test_a_graph_that_breaks_is_kept(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = capture(module, monkeypatch, "PIECEWISE", marked_late=False)
    assert entry.capture.num_eager_breaks == 1


def test_a_graph_without_a_break_is_refused(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(graph_breaks.GraphBreaksError) as refusal:
        capture(module, monkeypatch, "PIECEWISE", marked_late=True)
    for part in ("48 tokens", VARIABLE, "fork", "FULL_DECODE_ONLY"):
        assert part in str(refusal.value)


def test_a_graph_of_decoding_alone_needs_none(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert capture(module, monkeypatch, "FULL", marked_late=True).capture.num_eager_breaks == 0


def test_another_vllm_is_said_and_left_alone() -> None:
    found: Any = ModuleType("vllm.compilation.breakable_cudagraph")
    assert graph_breaks.patch(found).examine().state is State.NOT_APPLICABLE
    found.BreakableCUDAGraphWrapper = type("Wrapper", (), {"_capture": lambda self, key: None})
    verdict = graph_breaks.patch(found).examine()
    assert verdict.state is State.REFUSED and "_capture" in verdict.reason
    found.BreakableCUDAGraphWrapper = type(
        "Wrapper", (), {"_capture": lambda self, entry, args, kwargs: None}
    )
    found.BreakableCUDAGraphCapture = type("Capture", (), {})
    assert "num_eager_breaks" in graph_breaks.patch(found).examine().reason
    found.BreakableCUDAGraphCapture = type("Capture", (), {"num_eager_breaks": 0})
    assert "get_forward_context" in graph_breaks.patch(found).examine().reason
