"""GSM8K as a workload of `sweep` and `measure`: its questions under load, and its accuracy by a protocol.

    dspark-tune sweep --profile mi355x.yaml --workload gsm8k --data FOLDER --accuracy-problems 1319
    dspark-tune measure --profile mi355x.yaml --workload gsm8k/vllm-8shot --data hub

Accuracy is asked as `gsm8k run` asks it, with the protocol's own shots, limit and stop strings, and a run
that the protocol calls void fails its configuration. Load levels send each question alone, without shots:
eight shots before every one would be the same thousand tokens each time, which a prefix cache would answer.

Not covered: protocols that draw by chance, which a comparison of greedy answers can't use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dspark_deploy.errors import InputError
from tuning.accuracy import AccuracyRun, Item
from tuning.endpoint import Endpoint
from tuning.gsm8k.dataset import Dataset, load_gsm8k
from tuning.gsm8k.protocols import Protocol, find_protocol
from tuning.gsm8k.run import void_reasons
from tuning.workload import FromFile, Question

DEFAULT = "strict-8shot"


@dataclass(kw_only=True)
class Gsm8k(FromFile):
    """GSM8K by one protocol. Load levels go through its questions in their order, each level another part."""

    protocol: Protocol
    dataset: Dataset

    def questions(self, count: int) -> list[Question]:
        """The first `count` questions with the protocol's prompt and right answer."""
        return self.protocol.questions(self.dataset, count)

    def most_questions(self) -> int:
        """All of the test set."""
        return len(self.dataset.test)

    def longest_answer(self, output_tokens: int) -> int:
        """The protocol's own limit."""
        return self.protocol.sampling.max_tokens

    def asker(self, endpoint: Endpoint) -> Callable[[Question], Item]:
        """As the protocol asks."""
        return self.protocol.asker(endpoint, {}, 0)

    def void_reasons(self, run: AccuracyRun) -> list[str]:
        """Why the answers have no accuracy, by the protocol's own rules."""
        return void_reasons(run, self.protocol)

    def fingerprint(self) -> str:
        """Of shots, questions and protocol."""
        parts = (self.dataset.shots_sha256, self.dataset.test_sha256, self.protocol.name)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def gsm8k_workload(name: str, data: str | None) -> Gsm8k:
    """`gsm8k` or `gsm8k/PROTOCOL`. Raises InputError without data, or for a protocol that isn't greedy."""
    protocol = find_protocol(name.partition("/")[2] or DEFAULT, data)
    if protocol.tiny:
        raise InputError(f"workload {name}: the built-in checkpoint's problems are workload tiny-arithmetic")
    if protocol.sampling.temperature > 0:
        raise InputError(
            f"workload {name}: the protocol draws by chance, and configurations are compared by greedy "
            f"answers; use gsm8k/{DEFAULT}, or `dspark-tune gsm8k run` for this protocol"
        )
    if data is None:
        raise InputError(f"workload {name} needs GSM8K's files: name their folder with --data, or --data hub")
    dataset = load_gsm8k(data)
    prompts = [f"Question: {row.question}\nAnswer:" for row in dataset.test]
    return Gsm8k(Path(data), f"gsm8k/{protocol.name}", prompts, protocol=protocol, dataset=dataset)
