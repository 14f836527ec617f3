"""Runs one launch twice, in the interpreter and in the twin, and compares every byte of every tensor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dspark_deploy.plugin.cpu_engine.twins import CATALOGUE, Twin, install
from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED, TwinKernel

TWINS: dict[str, Twin] = {twin.twin.split(":")[1]: twin for twin in CATALOGUE}
SEEDS = st.integers(0, 2**32 - 1)

# An interpreted launch takes milliseconds to seconds, so examples are few and have no deadline.
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
fewer = settings(few, max_examples=15)


@functools.cache
def kernel(name: str) -> Any:
    """vLLM's own kernel for the twin called `name`, whatever stands in its place later."""
    found = install._kernel(TWINS[name])
    return found.kernel if isinstance(found, TwinKernel) else found


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def compare(
    name: str, grid: tuple[int, ...], arguments: dict[str, Any], twin: Any = None
) -> dict[str, torch.Tensor]:
    """Launch both on copies of `arguments`, by name; returns the tensors as the interpreter left them.

    Fails where a byte differs, in what was to be written or in what wasn't.
    """
    reference = kernel(name)
    ours = twin or install.function(TWINS[name])
    expected, actual = _copies(arguments), _copies(arguments)
    reference[grid](**expected)
    positional = [actual[key] for key in reference.arg_names if key in actual]
    assert ours(grid, *positional) is not DECLINED
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            differs = np.flatnonzero(bytes_of(value) != bytes_of(actual[key]))
            assert not len(differs), (
                f"{key} differs in {len(differs)} bytes:\n{value}\n{actual[key]}\nwas {arguments[key]}"
            )
    return {key: value for key, value in expected.items() if isinstance(value, torch.Tensor)}


def _copies(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()
    }


def parameters(name: str) -> list[str]:
    return list(inspect.signature(install.function(TWINS[name])).parameters)[1:-1]


class Batch:
    """A mixed batch in vLLM's layout: prefilling, finishing its prefill, and decoding with or without drafts.

    `garbage` fills what a kernel is to write, so that a cell that it must leave alone is seen to be left.
    """

    def __init__(self, seed: int, requests: int, k: int, spare_slots: int = 3, dummies: bool = False) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.requests, self.k = requests, k
        self.slot_count = requests + spare_slots
        self.slots = rng.permutation(self.slot_count)[:requests].astype(np.int64)
        if dummies:
            self.slots[rng.random(requests) < 0.3] = -1
        self.drafts = rng.integers(0, k + 1, requests) if k else np.zeros(requests, dtype=np.int64)
        kind = rng.integers(0, 4, requests)
        self.prefill = rng.integers(1, 40, self.slot_count).astype(np.int32)
        self.computed = np.zeros(self.slot_count, dtype=np.int32)
        self.queries = np.zeros(requests, dtype=np.int32)
        for request, slot in enumerate(self.slots):
            length = self.prefill[slot]
            if kind[request] == 0:  # in its prefill, not at its end
                self.computed[slot] = rng.integers(0, length)
                self.queries[request] = rng.integers(1, length - self.computed[slot] + 1)
                self.drafts[request] = 0
            elif kind[request] == 1:  # the last chunk of its prefill
                self.computed[slot] = rng.integers(0, length)
                self.queries[request] = length - self.computed[slot]
                self.drafts[request] = 0
            else:
                self.computed[slot] = length + rng.integers(0, 9)
                self.queries[request] = 1 + self.drafts[request]
        self.rows = (1 + self.drafts).astype(np.int32)
        self.logits = int(self.rows.sum())
        self.tokens = int(self.queries.sum())
        self.query_start = self._cumulative(self.queries)
        self.cu_logits = self._cumulative(self.rows)

    @staticmethod
    def _cumulative(lengths: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    def garbage(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        values = torch.from_numpy(self.rng.integers(-99, 99, shape))
        return values.to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(low, high, shape)).to(dtype)

    @property
    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and place of each row of logits."""
        places = np.concatenate([np.arange(count) for count in self.rows])
        return torch.from_numpy(np.repeat(self.slots, self.rows)), torch.from_numpy(places.astype(np.int32))


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


class Compared:
    """Stands for a kernel while vLLM's own function launches it: each launch is compared, then counts."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self.name, self.launched = name, launched
        self.kernel = kernel(name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            arguments = dict(zip(self.kernel.arg_names, args, strict=False))
            arguments |= {key: value for key, value in kwargs.items() if key in self.kernel.arg_names}
            left = compare(self.name, grid, arguments)
            self.launched.append(self.name)
            for key, value in left.items():
                arguments[key].copy_(value)

        return launch


def verification_inputs(
    seed: int, requests: int, k: int, vocab: int, drafted: bool, halves: bool, temperatures: list[float]
) -> tuple[Batch, dict[str, Any]]:
    """Arguments of vLLM's `rejection_sample`, with drafts that the target agrees with often, not always."""
    batch = Batch(seed, requests, k)
    rng = batch.rng
    slots, places = batch.expanded
    dtype = torch.bfloat16 if halves else torch.float32
    target = torch.from_numpy(rng.normal(0, 3, (batch.logits, vocab)).astype(np.float32))
    target[torch.from_numpy(rng.random(target.shape) < 0.1)] = -np.inf
    target[:, 0] = 0.5  # no row is excluded altogether
    draft = torch.from_numpy(rng.normal(0, 3, (batch.slot_count, k, vocab)).astype(np.float32))
    chosen = rng.integers(0, vocab, batch.logits)
    for row, (slot, place) in enumerate(zip(slots.tolist(), places.tolist(), strict=True)):
        if place < k and rng.random() < 0.7:
            draft[slot, place] = target[row] + torch.from_numpy(rng.normal(0, 0.3, vocab).astype(np.float32))
            if rng.random() < 0.8 and row + 1 < batch.logits:
                chosen[row + 1] = int(target[row].argmax())
    chosen[rng.random(batch.logits) < 0.1] = -1
    temperature = torch.from_numpy(rng.choice(temperatures, batch.slot_count).astype(np.float32))
    return batch, {
        "target_logits": target.to(dtype),
        "draft_logits": draft.to(dtype) if drafted else None,
        "draft_sampled": torch.from_numpy(chosen.astype(np.int32)),
        "cu_num_logits": tensor(batch.cu_logits),
        "pos": batch.integers(0, 2**33, batch.logits, dtype=torch.int64),
        "idx_mapping": tensor(batch.slots),
        "expanded_idx_mapping": slots,
        "expanded_local_pos": places,
        "temperature": temperature,
        "seed": batch.integers(-(2**63), 2**63 - 1, batch.slot_count, dtype=torch.int64),
        "num_speculative_steps": k,
    }


@contextmanager
def installed() -> Iterator[None]:
    """All twins in their kernels' places, as in a worker, and the kernels back afterwards."""
    for name, twin in TWINS.items():
        install.put(twin, TwinKernel(kernel(name), install.function(twin)))
    try:
        yield
    finally:
        for name, twin in TWINS.items():
            install.put(twin, kernel(name))
