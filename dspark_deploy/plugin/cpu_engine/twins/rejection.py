"""Twins of the kernels that accept or reject drafts and replace the first rejected one.

Contracts are those of `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils`; shapes and the terms used
here are those of `verification`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dspark_deploy.plugin.cpu_engine.twins import philox
from dspark_deploy.plugin.cpu_engine.twins.arrays import Array, flat, floats, gaps, segments
from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED
from dspark_deploy.plugin.cpu_engine.twins.sampling import block_argmax, noised
from dspark_deploy.plugin.cpu_engine.twins.verification import global_logsumexp, log_probabilities

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


def rejection(
    grid: tuple[int, ...],
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
    **_options: Any,
) -> None:
    """Accept each request's drafts up to the first that fails, greedily, by ratio, by block or by rate.

    grid is (R,). Reads draft_sampled [L] (row i + 1 holds the draft of row i; -1 can't be accepted), int64
    positions [L] and seeds [N], the statistics of the launches before. Writes int32 rejected_steps [R], the
    accepted drafts; int64 sampled[r, i] for every step i that was looked at: the draft, or for a greedy
    request's failing step the target's argmax; float32 logsumexps [R] of target and draft at the rejected
    row (block) or the last row looked at (ratio), 0 for greedy requests. The rest of `sampled` is untouched.
    """
    requests = grid[0]
    slots = flat(idx_mapping_ptr)[:requests]
    bounds = flat(cu_num_logits_ptr)[: requests + 1].astype(np.int64)
    scale = flat(temp_ptr)[slots]
    greedy = scale == 0.0
    drafted = flat(draft_sampled_ptr)
    accepted = np.zeros(requests, dtype=np.int64)
    sampled = sampled_ptr.numpy()
    lse = np.zeros((2, requests), dtype=np.float32)

    if greedy.any():
        best = _argmax(target_local_max_ptr, target_local_argmax_ptr)
        good = best[:-1] == drafted[1 : len(best)]
        if SYNTHETIC_MODE:
            assert synthetic_conditional_rates_ptr is not None
            owner, place = segments(gaps(bounds))
            draws = philox.uniform(flat(seed_ptr)[slots[owner[:-1]]], flat(pos_ptr)[: len(good)])
            rates = np.append(flat(synthetic_conditional_rates_ptr), 0.0)[place[:-1]]
            good = (draws < rates) & (drafted[1 : len(best)] >= 0)
            best = np.append(np.where(good, drafted[1 : len(best)], best[:-1]), -1)
        _accept_greedily(
            np.flatnonzero(greedy).tolist(), bounds.tolist(), good.tolist(), best, sampled, accepted
        )

    if not greedy.all():
        owner, place = segments(np.where(greedy, 0, gaps(bounds) - 1))
        rows = bounds[owner] + place
        tokens = drafted[rows + 1].astype(np.int64)
        known = tokens >= 0
        draws = philox.uniform(flat(seed_ptr)[slots[owner]], flat(pos_ptr)[rows])
        until = _leading(known, owner, place, requests)
        if USE_BLOCK_VERIFICATION:
            assert cumulative_log_p_ptr is not None
            threshold = _block_thresholds(
                rows, rows + 2 < bounds[owner + 1], drafted, flat(cumulative_log_p_ptr),
                local_residual_mass_ptr, target_logits_ptr, target_local_max_ptr, target_local_sumexp_ptr,
                PADDED_VOCAB_NUM_BLOCKS,
            )  # fmt: skip
            seen = np.flatnonzero(place < until[owner])
            passed = seen[draws[seen] <= threshold[seen]]
            # The longest block that passes counts; steps rise within a request, so the last one stays.
            accepted[owner[passed]] = place[passed] + 1
            failed = np.flatnonzero(~greedy & (accepted < gaps(bounds) - 1))
            after = bounds[failed] + accepted[failed]
            stats = [(target_local_max_ptr, target_local_sumexp_ptr)]
            if HAS_DRAFT_LOGITS:
                stats.append((draft_local_max_ptr, draft_local_sumexp_ptr))
            for out, (maxima, sums) in zip(lse, stats, strict=False):
                out[failed] = global_logsumexp(maxima, sums, after, PADDED_VOCAB_NUM_BLOCKS)
        else:
            target, draft, *row_lse = log_probabilities(
                rows, np.maximum(tokens, 0), slots[owner], place, scale[owner],
                target_logits_ptr, target_local_max_ptr, target_local_sumexp_ptr,
                draft_logits_ptr if HAS_DRAFT_LOGITS else None, draft_local_max_ptr, draft_local_sumexp_ptr,
                PADDED_VOCAB_NUM_BLOCKS,
            )  # fmt: skip
            if SYNTHETIC_MODE:
                assert synthetic_conditional_rates_ptr is not None
                passes = draws < flat(synthetic_conditional_rates_ptr)[place]
            else:
                passes = target > np.log(draws) + draft
            until = np.minimum(until, _leading(passes & known, owner, place, requests) + 1)
            seen = np.flatnonzero(place < until[owner])
            np.add.at(accepted, owner[seen], passes[seen])
            for out, values in zip(lse, row_lse, strict=True):
                out[owner[seen]] = values[seen]  # the last one looked at stays
        sampled[owner[seen], place[seen]] = tokens[seen]

    flat(rejected_steps_ptr)[:requests] = accepted
    flat(target_rejected_logsumexp_ptr)[:requests] = lse[0]
    flat(draft_rejected_logsumexp_ptr)[:requests] = lse[1]


def _accept_greedily(
    requests: list[int], bounds: list[int], good: list[bool], written: Array, sampled: Array, accepted: Array
) -> None:
    """Up to the first row that isn't good. A plain loop: for a handful of requests it beats array code."""
    for request in requests:
        start, last = bounds[request], bounds[request + 1] - 1
        row = start
        while row < last and good[row]:
            row += 1
        accepted[request] = row - start
        looked_at = min(row + 1, last) - start
        sampled[request, :looked_at] = written[start : start + looked_at]


def _leading(good: Array, owner: Array, place: Array, requests: int) -> Array:
    """How many of each request's steps, from its first, are good: int64 [R]."""
    steps = np.zeros((requests, int(place.max(initial=0)) + 2), dtype=bool)
    steps[owner, place] = good
    return steps.argmin(axis=1)


def _argmax(maxima: torch.Tensor, argmaxes: torch.Tensor) -> Array:
    """Each row's argmax over its blocks; the maxima of a single block needn't be looked at."""
    if maxima.shape[1] == 1:
        return argmaxes.numpy()[:, 0]
    top = maxima.numpy()
    top = np.where(np.isnan(top), -np.inf, top)
    return argmaxes.numpy()[np.arange(len(top)), top.argmax(axis=1)]


def _block_thresholds(
    rows: Array,
    has_next: Array,
    draft_sampled: Array,
    cumulative_log_p: Array,
    local_residual_mass: torch.Tensor | None,
    target_logits: torch.Tensor,
    target_max: torch.Tensor,
    target_sumexp: torch.Tensor,
    padded_blocks: int,
) -> Array:
    """Block verification's acceptance threshold h of each row (Sun et al., 2024): float32 [n]."""
    joint = np.exp(cumulative_log_p[rows])
    following = np.full(len(rows), -1, dtype=np.int64)
    following[has_next] = draft_sampled[rows[has_next] + 2]
    ahead = np.flatnonzero(following >= 0)
    threshold = joint.copy()
    if len(ahead):
        after = rows[ahead] + 1
        if local_residual_mass is not None:
            partial = local_residual_mass.numpy()[after]
            if padded_blocks != partial.shape[1]:
                partial = np.pad(partial, ((0, 0), (0, padded_blocks - partial.shape[1])))
            mass = partial.sum(axis=-1)
        else:
            lse = global_logsumexp(target_max, target_sumexp, after, padded_blocks)
            mass = joint[ahead] * (_ONE - np.exp(floats(target_logits)[after, following[ahead]] - lse))
        denominator = mass + _ONE - joint[ahead]
        with np.errstate(all="ignore"):  # the quotient isn't used where the denominator is 0
            threshold[ahead] = np.where(denominator > _ZERO, mass / denominator, _ONE)
    return threshold


def resample(
    grid: tuple[int, ...],
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
    **_options: Any,
) -> object:
    """Draw the token after the accepted ones: from the residual, or from the target where none was rejected.

    grid is (R, B). Writes int64 resampled_local_argmax and resampled_local_max [R, B] (float32, or float64
    with USE_FP64); a greedy request that rejected a draft has its token already, and its rows are untouched.
    Declines watermarks.
    """
    if WATERMARK:
        return DECLINED
    requests = grid[0]
    steps = flat(rejected_step_ptr)[:requests].astype(np.int64)
    bounds = flat(cu_num_logits_ptr)[: requests + 1].astype(np.int64)
    rows = bounds[:-1] + steps
    scale = flat(temp_ptr)[flat(expanded_idx_mapping_ptr)[rows]]
    bonus = rows == bounds[1:] - 1
    chosen = np.flatnonzero(bonus | (scale != 0.0))
    if not len(chosen):
        return None
    rows, steps, scale, bonus = rows[chosen], steps[chosen], scale[chosen], bonus[chosen]
    slots = flat(expanded_idx_mapping_ptr)[rows]
    target = floats(target_logits_ptr[torch.from_numpy(rows), :vocab_size])
    rejected = np.full(len(rows), -1, dtype=np.int64)
    rejected[~bonus] = flat(draft_sampled_ptr)[rows[~bonus] + 1]
    partial = np.flatnonzero(rejected >= 0)
    if len(partial) and not HAS_DRAFT_LOGITS:
        target = target.copy()
        target[partial, rejected[partial]] = -np.inf
    elif len(partial):
        assert draft_logits_ptr is not None
        where = (torch.from_numpy(slots[partial]), torch.from_numpy(steps[partial]))
        lifted = target[partial] - flat(target_rejected_logsumexp_ptr)[chosen[partial], None]
        if USE_BLOCK_VERIFICATION:
            assert cumulative_log_p_ptr is not None
            # Row 0 has no ratio before it; what is read for it instead is discarded.
            before = flat(cumulative_log_p_ptr)[np.maximum(rows[partial] - 1, 0)]
            lifted = lifted + np.where(steps[partial] > 0, before, _ZERO)[:, None]
        draft = floats(draft_logits_ptr[(*where, slice(vocab_size))]) / scale[partial, None]
        draft -= flat(draft_rejected_logsumexp_ptr)[chosen[partial], None]
        with np.errstate(all="ignore"):  # tokens without residual take the other branch
            ratio = np.exp(draft - lifted)
            residual = np.where(ratio < _ONE, lifted + np.log1p(-ratio), np.float32(-np.inf))
        target = target.copy()
        target[partial] = residual
    if scale.any():
        target = noised(target, scale, flat(seed_ptr)[slots], flat(pos_ptr)[rows], False, USE_FP64)
    best, value = block_argmax(target, BLOCK_SIZE)
    resampled_local_argmax_ptr.numpy()[chosen] = best
    resampled_local_max_ptr.numpy()[chosen] = value
    return None


def insert_resampled(
    grid: tuple[int, ...],
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
    **_options: Any,
) -> None:
    """Put the redrawn token behind the accepted ones, and count it.

    grid is (R,). Writes num_sampled + 1 (int32 [R], in place), and int64 sampled[r, num_sampled[r]] except
    for a greedy request that rejected a draft.
    """
    requests = grid[0]
    counts = flat(num_sampled_ptr)[:requests]
    bounds = flat(cu_num_logits_ptr)[: requests + 1]
    rows = bounds[:-1] + counts
    scale = flat(temp_ptr)[flat(expanded_idx_mapping_ptr)[rows]]
    chosen = np.flatnonzero((scale != 0.0) | (rows == bounds[1:] - 1))
    if len(chosen):
        best = _argmax(resampled_local_max_ptr, resampled_local_argmax_ptr)
        sampled_ptr.numpy()[chosen, counts[chosen]] = best[chosen]
    counts += 1
