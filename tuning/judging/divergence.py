"""How far greedy answers of two builds drift apart, against how far one build drifts from itself.

    dspark-tune divergence --url http://a:8000 --out a.json       dspark-tune divergence a.json b.json

The first 24 greedy tokens and their log probabilities of 120 prompts, twice per build: in order, then in
another order, so that batches differ. Within a build that is the null; across builds, what is asked. Greedy
text differs between correct builds, since one token and k + 1 tokens are other matrix shapes (vllm#54506), so
this gates nothing: accuracy does. It says where to look.

    differing    share of prompts whose tokens differ, with Wilson's interval
    delta        median of |log probability difference| over the tokens before the first that differs
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dspark_deploy.errors import InputError, MeasurementError
from tuning.endpoint import Endpoint, Sampling
from tuning.record import Record
from tuning.statistics import proportion_interval

PROMPTS, TOKENS, PASSES = 120, 24, 2
KIND = "greedy-beginnings"
MOST_LISTED = 20

Beginning = dict[str, Any]
"""One prompt's first tokens and their log probabilities."""


def collect(
    endpoint: Endpoint, prompts: Sequence[str], concurrency: int, say: Callable[[str], None] = lambda _: None
) -> list[list[Beginning]]:
    """Both passes, each in the prompts' order. Raises RequestFailed and MeasurementError."""
    sampling = Sampling(TOKENS, logprobs=True)
    passes = []
    for number in range(PASSES):
        say(f"pass {number + 1} of {PASSES}, {len(prompts)} prompts")
        endpoint.reset_prefix_cache()
        order = list(range(len(prompts)))
        if number:
            random.Random(number).shuffle(order)  # noqa: S311
        with ThreadPoolExecutor(concurrency) as pool:
            answers = list(pool.map(lambda i: endpoint.complete(prompts[i], sampling), order))
        by_prompt = dict(zip(order, answers, strict=True))
        if not all(answer.tokens for answer in answers):
            raise MeasurementError(
                "the server gives no log probabilities; is it vLLM, and not told to hide them?"
            )
        passes.append(
            [
                {"tokens": list(by_prompt[i].tokens), "logprobs": list(by_prompt[i].logprobs)}
                for i in range(len(prompts))
            ]
        )
    return passes


def first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """The first position at which two token lists differ; None where they are the same."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def drift(one: Sequence[Beginning], other: Sequence[Beginning]) -> dict[str, Any]:
    """Two passes over the same prompts. Raises InputError where the numbers of prompts differ."""
    if len(one) != len(other) or not one:
        raise InputError(f"{len(one)} prompts against {len(other)}: not the same prompts")
    positions, deltas = [], []
    for a, b in zip(one, other, strict=True):
        position = first_difference(a["tokens"], b["tokens"])
        positions.append(position)
        same = zip(a["logprobs"][:position], b["logprobs"][:position], strict=True)
        deltas += [abs(x - y) for x, y in same]
    differing = [position for position in positions if position is not None]
    return {
        "prompts": len(one),
        "differing": len(differing),
        "share": len(differing) / len(one),
        "interval": asdict(proportion_interval(len(differing), len(one))),
        "median_first_difference": float(np.median(differing)) if differing else None,
        "median_logprob_delta": float(np.median(deltas)) if deltas else None,
        "p99_logprob_delta": float(np.percentile(deltas, 99)) if deltas else None,
        "prompts_differing": [i for i, position in enumerate(positions) if position is not None][
            :MOST_LISTED
        ],
    }


def within(document: dict[str, Any]) -> dict[str, Any]:
    """The null: a build against itself."""
    return drift(*document["passes"])


def across(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two builds: both nulls, and their first passes against one another. Raises InputError."""
    if first["prompts_sha256"] != second["prompts_sha256"]:
        raise InputError("the two files are about different prompts; collect both with the same --data")
    return {
        "within": [within(first), within(second)],
        "across": drift(first["passes"][0], second["passes"][0]),
    }


def read_beginnings(path: Path) -> dict[str, Any]:
    """A file that `dspark-tune divergence --out` wrote. Raises InputError."""
    record = Record.read(path)
    if record.kind != KIND:
        raise InputError(f"{path}: is a record of {record.kind}; name files of dspark-tune divergence --out")
    passes = record.result["passes"]
    if any(len(row["tokens"]) != len(row["logprobs"]) for each in passes for row in each):
        raise InputError(f"{path}: is damaged: tokens and log probabilities differ in number")
    return record.result
