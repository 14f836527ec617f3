"""Whole functions of vLLM's DSpark step in their plainest case: everything greedy.

Most of what a greedy step costs on a CPU, once its kernels are cheap, is the many small calls around them.
Each function here wraps one of vLLM's, does the greedy case itself with the same arithmetic, and hands every
other case to the original. The results are the original's to the bit, as `tests/twins` shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dspark_deploy.plugin.cpu_engine.twins.arrays import flat, floats


def rejection_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils.rejection_sample`.

    The wrapper takes its arguments: target logits [L, V], draft_sampled and cu_num_logits as in
    `verification`, temperature [N]. It returns int64 tokens [R, k + 1] and their int32 numbers [R]: a greedy
    request keeps its drafts up to the first that isn't its row's argmax, and that row's argmax follows. What
    lies past a request's number is undefined, as in the original. Synthetic acceptance, watermarks, sampled
    requests and NaN go to the original.
    """

    @functools.wraps(original)
    def sample(
        target_logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        pos: torch.Tensor,
        idx_mapping: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        num_speculative_steps: int,
        synthetic_conditional_rates: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def otherwise() -> Any:
            return original(
                target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping,
                expanded_idx_mapping, expanded_local_pos, temperature, seed, num_speculative_steps,
                synthetic_conditional_rates, **others,
            )  # fmt: skip

        watermark = others.get("contexts") is not None
        if synthetic_conditional_rates is not None or watermark or flat(temperature)[flat(idx_mapping)].any():
            return otherwise()
        logits = floats(target_logits)
        if draft_logits is not None:
            logits = logits[:, : draft_logits.shape[-1]]
        best = logits.argmax(axis=1)
        if np.isnan(logits[np.arange(len(best)), best]).any():
            return otherwise()
        bounds, argmax, drafted = cu_num_logits.tolist(), best.tolist(), draft_sampled.tolist()
        requests = len(bounds) - 1
        sampled = torch.empty((requests, num_speculative_steps + 1), dtype=torch.int64)
        counts = torch.empty(requests, dtype=torch.int32)
        tokens, numbers = sampled.numpy(), counts.numpy()
        for request in range(requests):
            start, last = bounds[request], bounds[request + 1] - 1
            row = start
            while row < last and argmax[row] == drafted[row + 1]:
                row += 1
            numbers[request] = row - start + 1
            tokens[request, : row - start + 1] = best[start : row + 1]
        return sampled, counts

    return sample


def sample_sequential(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps `DSparkSpeculator._sample_sequential`, which drafts k tokens one after the other.

    The wrapper takes the speculator, the number of requests and the draft's hidden states, and writes int64
    `draft_tokens[:R]`. It makes the original's tensor operations, without the modules around them. Sampled
    drafts, reduced vocabularies, scaled logits, confidence heads, estimators and Markov heads of another
    make than vLLM's unquantised one go to the original.
    """

    @functools.wraps(original)
    def sample(self: Any, num_reqs: int, head_hidden: torch.Tensor) -> None:
        head = _plain_markov_head(self)
        if head is None:
            original(self, num_reqs, head_hidden)
            return
        embedding, project, weight, vocab = head
        steps = self.num_speculative_steps
        hidden = head_hidden[self.sample_indices[: num_reqs * steps]]
        base = self.model.compute_draft_logits(hidden).view(num_reqs, steps, -1)
        previous = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]]
        drafts = self.draft_tokens
        for step in range(steps):
            bias = project(torch.nn.functional.embedding(previous, embedding), weight, None)
            previous = (base[:, step] + bias[:, :vocab]).argmax(dim=-1)
            drafts[:num_reqs, step] = previous

    return sample


def _plain_markov_head(speculator: Any) -> tuple[torch.Tensor, Any, torch.Tensor, int] | None:
    """Embedding, projection, its weight, and the vocabulary of a head that needs nothing else; else None."""
    model = speculator.model
    processor: Any = getattr(model, "logits_processor", None)
    markov: Any = getattr(getattr(model, "model", None), "markov_head", None)
    if (
        speculator.draft_logits is not None
        or speculator._draft_topk is not None
        or speculator.use_confidence_head
        or speculator.acceptance_estimator is not None
        or getattr(model, "draft_id_to_target_id", 0) is not None
        or processor is None
        or processor.scale != 1.0
        or processor.soft_cap is not None
        or type(markov).__name__ != "DSparkMarkovHead"
    ):
        return None
    projection = markov.markov_w2
    embedding = markov.markov_w1.weight
    plain = type(projection.quant_method).__name__ == "UnquantizedEmbeddingMethod"
    if not plain or projection.tp_size != 1 or processor.head_dtype not in (None, embedding.dtype):
        return None
    return embedding, projection.cpu_linear, projection.weight, processor.org_vocab_size
