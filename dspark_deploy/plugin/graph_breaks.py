"""Refuses a breakable graph that never breaks: attention over a prompt was captured with all the rest.

vLLM captures the prompts of a model that torch.compile doesn't split in graphs which give way to attention
(`VLLM_USE_BREAKABLE_CUDAGRAPH`). What marks attention in the model's code looks at the variable once, on
import; the capture asks again later. Where the variable is set between the two, as by vLLM itself before it
forks its engine, no mark is left: the graph holds the attention of the batch it was captured with, each
prompt that fits into one comes out wrong, and nothing says so (docs/h200.md, "Graphs that don't break").

    vllm.compilation.breakable_cudagraph.BreakableCUDAGraphWrapper._capture

is followed by a look at the graph's number of breaks. Not covered: a model of which some attention is marked
and some isn't, and graphs that torch.compile has split.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, not_applicable, refused
from dspark_deploy.plugin.when_loaded import when_loaded

MODULE = "vllm.compilation.breakable_cudagraph"
WHY = "a graph that holds the attention of another batch is refused before it serves"

ApplyLate = Callable[[list[Patch]], None]


class GraphBreaksError(RuntimeError):
    """A breakable graph was captured without a break; prompts in it would come out wrong."""


def hook(apply_late: ApplyLate) -> Patch:
    """The patch of the general phase: it comes with vLLM's module of breakable graphs."""

    def install() -> str:
        when_loaded(MODULE, lambda module: apply_late([patch(module)]))
        return "breakable graphs will be looked at when they are captured"

    return Patch("graph-breaks-watch", "sys.meta_path", "not every vLLM has them", lambda: READY, install)


def patch(module: ModuleType) -> Patch:
    """The patch of `vllm.compilation.breakable_cudagraph`."""
    target = f"{MODULE}.BreakableCUDAGraphWrapper._capture"
    return Patch(
        "graph-breaks", target, WHY, functools.partial(_examine, module), functools.partial(_install, module)
    )


def _examine(module: ModuleType) -> Verdict:
    wrapper, capture = (
        getattr(module, name, None) for name in ("BreakableCUDAGraphWrapper", "BreakableCUDAGraphCapture")
    )
    if wrapper is None:
        return not_applicable("this vLLM has no breakable graphs")
    original = getattr(wrapper, "_capture", None)
    if not callable(original) or next(iter(list(inspect.signature(original).parameters)[1:]), "") != "entry":
        return refused("BreakableCUDAGraphWrapper has no _capture(entry, ...), which captures one graph")
    if not hasattr(capture, "num_eager_breaks"):
        return refused("BreakableCUDAGraphCapture has no num_eager_breaks, which counts a graph's breaks")
    missing = [name for name in ("get_forward_context", "CUDAGraphMode") if not hasattr(module, name)]
    return refused(f"{MODULE} has no {missing[0]}, which tells a graph's mode") if missing else READY


def _install(module: Any) -> str:
    original = module.BreakableCUDAGraphWrapper._capture

    @functools.wraps(original)
    def capture_looked_at(self: Any, entry: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, entry, *args, **kwargs)
        # A graph in mode FULL is one of decoding alone, whose attention belongs into it.
        piecewise = module.get_forward_context().cudagraph_runtime_mode == module.CUDAGraphMode.PIECEWISE
        if piecewise and entry.capture.num_eager_breaks == 0:
            raise GraphBreaksError(_message(entry))
        return result

    module.BreakableCUDAGraphWrapper._capture = capture_looked_at
    return "each breakable graph has a break, or the engine doesn't start"


def _message(entry: Any) -> str:
    tokens = getattr(getattr(entry, "batch_descriptor", None), "num_tokens", "some")
    return (
        f"dspark-deploy: the breakable graph of {tokens} tokens has no break: attention was captured with "
        "the rest, and prompts that fit into it would come out wrong. VLLM_USE_BREAKABLE_CUDAGRAPH was set "
        "after the model's code was imported, or its attention isn't marked. Set it in engine.env, leave "
        "VLLM_WORKER_MULTIPROC_METHOD=fork out, or capture for decoding alone: compilation-config: "
        "{cudagraph_mode: FULL_DECODE_ONLY}"
    )
