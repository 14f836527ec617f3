"""DeepSeek-V4's routing in torch, for expert counts that vLLM's CPU kernel is not compiled for.

Formula as in vLLM's `_sqrtsoftplus_bias_topk`: an expert's score is the square root of its softplus; the best
by score plus bias are chosen, and weighted by score alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def biased_topk_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    num_fused_shared_experts: int,
    routed_scaling_factor: float | None,
    apply_routed_scaling_factor_on_output: bool,
) -> tuple[Tensor, Tensor]:
    """[T, experts] -> weights [T, topk], fp32, and experts [T, topk], int32.

    Raises ValueError for another routing than DeepSeek-V4's.
    """
    if scoring_func != "sqrtsoftplus" or not renormalize or num_fused_shared_experts:
        raise ValueError(f"routing {scoring_func!r} with renormalize={renormalize} is not DeepSeek-V4's")
    scores = F.softplus(gating_output.float()).sqrt()
    chosen = (scores + correction_bias.float()).topk(topk, -1).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    if apply_routed_scaling_factor_on_output and routed_scaling_factor is not None:
        weights = weights * routed_scaling_factor
    return weights, chosen.to(torch.int32)
