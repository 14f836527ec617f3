"""Unquantised experts whose activation is limited, in torch: vLLM's CPU kernel leaves `swiglu_limit` out.

DeepSeek-V4's experts compute silu(min(gate, L)) * clamp(up, -L, L). Where a model's activations stay under L
the kernel is right; where they don't, it is silently wrong. Experts without a limit keep vLLM's kernel.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, refused, upstream

EXPERTS, CLASS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts"
LIMIT = "clamp_limit"
"""What vLLM's other experts in that module call the limit; a class that reads it needs no patch."""


def experts_patch(module: ModuleType) -> Patch:
    """The patch of vLLM's unquantised CPU experts."""
    return Patch(
        "cpu-v4-experts",
        f"{EXPERTS}.{CLASS}",
        "experts with a limited activation compute it: vLLM's kernel ignores swiglu_limit",
        functools.partial(_examine, module),
        functools.partial(_install, module),
    )


def limited_experts(x: Any, gates_ups: Any, downs: Any, weights: Any, chosen: Any, limit: float) -> Any:
    """The experts' weighted sum, fp32: [T, D], [X, 2F, D], [X, D, F], [T, K] twice -> [T, D].

    Every expert is computed for every token: for a few small ones that is cheaper than gathering tokens.
    """
    import torch
    from torch.nn import functional as F

    both = torch.einsum("td,xfd->txf", x, gates_ups)
    gate, up = both.float().chunk(2, -1)
    inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    spread = torch.zeros(len(x), len(downs)).scatter_add_(1, chosen.long(), weights.float())
    return torch.einsum("txf,xdf->td", inner * spread.unsqueeze(-1), downs.float())


def _examine(module: ModuleType) -> Verdict:
    import inspect

    experts = getattr(module, CLASS, None)
    for method in ("process_weights_after_loading", "apply"):
        if not callable(getattr(experts, method, None)):
            return refused(f"{EXPERTS} has no {CLASS}.{method}")
    assert experts is not None
    if LIMIT in inspect.getsource(experts.apply):
        return upstream("it limits the activation itself")
    wanted = ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids")
    found = tuple(inspect.signature(experts.apply).parameters)[1 : len(wanted) + 1]
    return READY if found == wanted else refused(f"{CLASS}.apply takes ({', '.join(found)}, ...)")


def _install(module: Any) -> str:
    experts = getattr(module, CLASS)
    prepare, apply = experts.process_weights_after_loading, experts.apply

    @functools.wraps(prepare)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        limit = getattr(self.moe_config, "swiglu_limit", None)
        # vLLM repacks the weights in place, for its kernel alone.
        kept = None if limit is None else (layer.w13_weight.clone(), layer.w2_weight.clone(), float(limit))
        self._dspark_limited = kept
        prepare(self, layer)

    @functools.wraps(apply)
    def apply_limited(
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        *rest: Any,
        **named: Any,
    ) -> None:
        kept = getattr(self, "_dspark_limited", None)
        if kept is None:
            apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, **named)
        else:
            gates_ups, downs, limit = kept
            found = limited_experts(hidden_states, gates_ups, downs, topk_weights, topk_ids, limit)
            output.copy_(found.to(output.dtype))

    experts.process_weights_after_loading = process_weights_after_loading
    experts.apply = apply_limited
    return "experts with a swiglu_limit go to torch"
