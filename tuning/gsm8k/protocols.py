"""GSM8K protocols by name: what is asked, how, and which reading of the answer is the figure.

    vllm-8shot     what vLLM's own tests/evals/gsm8k/gsm8k_eval.py does with 8 shots: the first 8 training
                   items, `Question:/Answer:`, its stop strings, 256 tokens, greedy, the last run of digits.
                   Published with it for DeepSeek-V4 on MI355X: 89.76 % without DSpark, 90.90 % with.
    strict-8shot   ours: the same shots, 512 tokens, the first `####` or, flexibly, the last number
    thinking       one question in a chat, thinking on: temperature 1.0, top-p 0.95, 16,384 tokens, the
                   server's own encoding; what stands behind the end of thinking is read
    tiny-0shot     no GSM8K: the built-in checkpoint's own problems (`--data tiny`), to see a run on a machine
                   without a GPU; it compares with itself alone

One difference to upstream's script is meant: there a failed request is a wrong answer, here it voids the run.

Not covered: lm-evaluation-harness' own tasks; run it beside these for a third opinion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dspark_deploy.errors import InputError
from dspark_deploy.tiny import language
from tuning.accuracy import Item, item_of, state_of
from tuning.endpoint import Answer, Endpoint, Sampling
from tuning.gsm8k.dataset import TINY, Dataset
from tuning.gsm8k.extraction import END_OF_THINKING, flexible, strict, upstream
from tuning.workload import Question

INSTRUCTION = "\nReason step by step, then give the answer alone on the last line, as #### number."


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to ask and to read. `reading` is the headline; both other readings are kept beside it."""

    name: str
    sampling: Sampling
    reading: Callable[[str], str | None]
    chat: bool = False
    reads_truncated: bool = False
    wants_thinking: bool = False
    tiny: bool = False

    def prompt(self, question: str, data: Dataset) -> str:
        """The whole prompt of one question."""
        if self.tiny:
            return language.prompt_of(question)
        if self.chat:
            return question + INSTRUCTION
        shots = "".join(f"Question: {row.question}\nAnswer: {row.answer}\n\n" for row in data.shots)
        return f"{shots}Question: {question}\nAnswer:"

    def questions(self, data: Dataset, limit: int | None) -> list[Question]:
        """The first `limit` questions, by their index in the data."""
        rows = data.test[:limit]
        return [
            # Upstream reads the right answers as it reads the model's: without their sign, which two have.
            Question(f"gsm8k-{i}", self.prompt(row.question, data), self.reading(row.answer) or row.gold)
            for i, row in enumerate(rows)
        ]

    def describe(self) -> dict[str, Any]:
        """Everything that must be equal for two runs to be compared, as JSON values."""
        return {
            "protocol": self.name,
            "chat": self.chat,
            "reading": self.reading.__name__,
            "template": "the server's chat template" if self.chat else "none: raw prompt",
            "sampling": self.sampling.body(self.chat),
        }

    def score(self, question: Question, answer: Answer) -> Item:
        """The item of one answer, by all readings."""
        text = answer.text
        # A server with a reasoning parser hands thinking over apart; at the limit nothing else is left.
        unread = answer.finish_reason == "length" and not self.reads_truncated
        found = None if unread else self.reading(text)
        state = state_of(text or answer.reasoning, answer.finish_reason, found)
        item = item_of(question, answer, found, state, found is not None and found == question.gold)
        if unread:
            return item
        return replace(item, strict=strict(text), flexible=flexible(text))

    def asker(
        self, endpoint: Endpoint, extra: Mapping[str, Any], base_seed: int
    ) -> Callable[[Question], Item]:
        """Asks one question. Where tokens are drawn by chance, each question has a seed of its own."""

        def ask(question: Question) -> Item:
            sampling = replace(self.sampling, extra={**self.sampling.extra, **extra})
            if sampling.temperature > 0:
                index = int(question.id.rpartition("-")[2])
                sampling = replace(sampling, seed=base_seed + index)
            if self.chat:
                answer = endpoint.chat([{"role": "user", "content": question.prompt}], sampling)
            else:
                answer = endpoint.complete(question.prompt, sampling)
            return self.score(question, answer)

        return ask


def thought(item: Item) -> bool:
    """Whether an answer shows thinking, handed over apart or in the text."""
    return bool(item.reasoning) or END_OF_THINKING in item.text


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            "vllm-8shot",
            Sampling(256, seed=42, stop=("Question", "Assistant:", "<|separator|>")),
            upstream,
            reads_truncated=True,  # upstream's script doesn't look at how an answer ended
        ),
        Protocol("strict-8shot", Sampling(512, stop=("Question:", "</s>", "<|im_end|>")), flexible),
        Protocol(
            "thinking", Sampling(16384, temperature=1.0, top_p=0.95), flexible, chat=True, wants_thinking=True
        ),
        Protocol("tiny-0shot", Sampling(96, stop=("Q:",)), flexible, tiny=True),
    )
}


def find_protocol(name: str, data: str | None = None) -> Protocol:
    """The protocol of that name, where it fits the data, if any are named. Raises InputError."""
    if name not in PROTOCOLS:
        raise InputError(f"--protocol {name}: is none of {', '.join(PROTOCOLS)}")
    if data is not None and PROTOCOLS[name].tiny != (data == TINY):
        raise InputError(
            f"--protocol {name} doesn't go with --data {data}: tiny-0shot asks the built-in checkpoint's own "
            f"problems, which are --data {TINY}; all others ask GSM8K"
        )
    return PROTOCOLS[name]
