"""Workloads by name: what the engine is asked while it is measured.

    tiny-arithmetic    the built-in checkpoint's own language, with answers
    random             the seed protocol: random tokens, 1024 in and out, load 1, 8 prompts, EOS ignored
    sharegpt           first turns of a ShareGPT JSON file
    speed-bench        SPEED-Bench's folder of JSONL files; speed-bench-coding and the like: one category
    gsm8k[/PROTOCOL]   GSM8K, with answers: `tuning.gsm8k.workload`
    jsonl              your own: one {"prompt": "..."} a line; in records it has the file's name

A workload gives disjoint prompts for warming up, for each load level and for accuracy, where it has answers.
Load levels and repeats take turns through a file, so that none finds another's prompts in the prefix cache.
Random tokens give latency and never rank k: they make acceptance meaningless, both ways (vllm#33497).

Not covered: multi-turn conversations, and images.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_deploy.errors import InputError
from dspark_deploy.plain_json import json_lines, parse_json
from dspark_deploy.tiny import language

if TYPE_CHECKING:
    from tuning.accuracy import AccuracyRun, Item
    from tuning.endpoint import Endpoint

WARM_UP_TOKENS = 64
REPEAT_STRIDE = 1000


@dataclass(frozen=True, slots=True)
class Question:
    """One accuracy problem: what is asked, and the right answer."""

    id: str
    prompt: str
    gold: str


@dataclass(frozen=True, slots=True)
class Requests:
    """What `vllm bench serve` is to send: prompts of ours, or a dataset of its own by flags."""

    count: int
    prompts: Sequence[str] = ()
    arguments: Sequence[str] = ()


class Workload:
    """Base of all. `ranks_k`: whether acceptance on it means anything; `template`: who renders prompts."""

    name = ""
    ranks_k = True
    input_tokens = 1  # of a prompt, at the least
    template = "none: raw prompts to the completions endpoint"

    def warm_up_prompts(self, count: int) -> list[str]:
        """Prompts that no measurement uses: digits by chance, unless the workload has better."""
        drawn = random.Random(f"{self.name} warm-up")  # noqa: S311
        return [" ".join(str(drawn.randrange(10**6)) for _ in range(WARM_UP_TOKENS)) for _ in range(count)]

    def requests(self, load_index: int, count: int, repeat: int = 0) -> Requests:
        """The requests of one load level in one repeat. Raises InputError where prompts run out."""
        raise NotImplementedError

    def questions(self, count: int) -> list[Question]:
        """Problems with answers; a workload without any gives none."""
        return []

    def most_questions(self) -> int | None:
        """How many problems there are; None where as many as are wanted can be made, or there are none."""
        return None

    def longest_answer(self, output_tokens: int) -> int:
        """Tokens that an accuracy question may take; `output_tokens` is the limit under load."""
        return output_tokens

    def answer(self, text: str) -> str | None:
        """The answer that a completion gives, or None where it gives none."""
        return None

    def asker(self, endpoint: Endpoint) -> Callable[[Question], Item] | None:
        """How a question is asked, where the workload has a protocol; None for a plain greedy completion."""
        return None

    def void_reasons(self, run: AccuracyRun) -> list[str]:
        """Why answers have no accuracy by the workload's own rules; empty where they have one."""
        return []

    def fingerprint(self) -> str:
        """Hash of what the workload draws from."""
        raise NotImplementedError


class TinyArithmetic(Workload):
    """The built-in checkpoint's own language: word problems whose questions it has never seen."""

    name = "tiny-arithmetic"

    def warm_up_prompts(self, count: int) -> list[str]:
        """Prompts that no measurement uses."""
        return _prompts(language.WARM_UP_SEEDS[0], count)

    def load_prompts(self, load_index: int, count: int, repeat: int = 0) -> list[str]:
        """Prompts for one load level. Levels differ, so that no level finds another's prefix cached."""
        return _prompts(language.LOAD_SEEDS[load_index + REPEAT_STRIDE * repeat], count)

    def requests(self, load_index: int, count: int, repeat: int = 0) -> Requests:
        """As `load_prompts`."""
        return Requests(count, self.load_prompts(load_index, count, repeat))

    def questions(self, count: int) -> list[Question]:
        """Held-out problems with their answers."""
        drawn = language.problems(language.ACCURACY_SEEDS[0], count)
        return [Question(f"arithmetic-{i}", language.prompt(p), str(p.answer)) for i, p in enumerate(drawn)]

    def answer(self, text: str) -> str | None:
        """The answer that a completion gives, or None where it gives none."""
        found = language.final_answer(text)
        return None if found is None else str(found)

    def fingerprint(self) -> str:
        """Of the language's source: what is drawn follows from it."""
        return hashlib.sha256(Path(language.__file__).read_bytes()).hexdigest()


@dataclass
class RandomTokens(Workload):
    """The seed protocol of DSpark's first reports. Latency only: it never ranks k."""

    input_tokens: int = 1024
    output_tokens: int = 1024
    name: str = field(default="random", init=False)
    ranks_k = False

    def requests(self, load_index: int, count: int, repeat: int = 0) -> Requests:
        """vLLM's own random dataset, with a seed for each level and repeat."""
        arguments = (
            *("--dataset-name", "random", "--seed", str(load_index + REPEAT_STRIDE * repeat + 1)),
            *("--random-input-len", str(self.input_tokens), "--random-output-len", str(self.output_tokens)),
        )
        return Requests(count, arguments=arguments)

    def fingerprint(self) -> str:
        """Of the lengths; the seeds follow from the level and the repeat."""
        return hashlib.sha256(f"random {self.input_tokens} {self.output_tokens}".encode()).hexdigest()


@dataclass
class FromFile(Workload):
    """Prompts of a file, in its order: the first for warming up, then a slice for each level and repeat."""

    path: Path
    name: str
    prompts: list[str] = field(repr=False, default_factory=list)
    reserved: int = 0

    def warm_up_prompts(self, count: int) -> list[str]:
        """The file's last prompts, as far as a quarter of it goes; then digits."""
        self.reserved = min(count, len(self.prompts) // 4)
        own = self.prompts[len(self.prompts) - self.reserved :]
        return own + super().warm_up_prompts(count - len(own))

    def requests(self, load_index: int, count: int, repeat: int = 0) -> Requests:
        """The next `count` prompts. Raises InputError where the file is too short to be disjoint."""
        first = (load_index + repeat) * count
        found = self.prompts[first : first + count]
        if first + count > len(self.prompts) - self.reserved:
            raise InputError(
                f"{self.path}: has {len(self.prompts)} prompts, and level {load_index + 1} would need "
                f"{first + count} besides {self.reserved} for warming up; ask for fewer --requests or --loads"
            )
        return Requests(count, found)

    def fingerprint(self) -> str:
        """Of the prompts, in their order."""
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()


def _prompts(seed: int, count: int) -> list[str]:
    return [language.prompt(problem) for problem in language.problems(seed, count)]


def _json_lines(path: Path) -> list[Any]:
    try:
        lines = json_lines(path.read_text(encoding="utf-8"))
        return [parse_json(line) for _, line in lines]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as JSON lines: {error}") from error


def _read(name: str, path: Path, category: str = "") -> list[str]:
    """The prompts of a file in the form that `name` says, of SPEED-Bench one category. Raises InputError."""
    try:
        if name == "sharegpt":
            entries = parse_json(path.read_text(encoding="utf-8"))
            talks = [entry.get("conversations", []) for entry in entries]
            found = [talk[0]["value"] for talk in talks if len(talk) >= 2]
        elif name == "speed-bench":
            file = path / "qualitative.jsonl" if path.is_dir() else path
            rows = [row for row in _json_lines(file) if category in ("", row.get("category"))]
            found = [row["messages"][0]["content"] for row in rows]
        else:
            found = [row["prompt"] for row in _json_lines(path)]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        why = f" ({error})" if isinstance(error, OSError | ValueError) else ""
        form = FORMS.get(name, FORMS["jsonl"])
        raise InputError(f"{path}: isn't in the form of workload {name}, which is {form}{why}") from error
    if not found or not all(isinstance(prompt, str) for prompt in found):
        raise InputError(f"{path}: has no prompts in the form of workload {name}")
    return list(dict.fromkeys(found))  # a prompt that comes twice would meet itself in the prefix cache


FORMS = {
    "sharegpt": 'a JSON list of {"conversations": [{"value": "..."}, ...]}',
    "speed-bench": 'lines of {"messages": [{"content": "..."}]}',
    "jsonl": 'lines of {"prompt": "..."}',
}
FROM_FILES = ("sharegpt", "speed-bench", "jsonl")
CATEGORY = "speed-bench-"  # and one category's name
GSM8K = "gsm8k"
WITH_ANSWERS = (TinyArithmetic.name, GSM8K)
WORKLOADS = (*WITH_ANSWERS, "random", *FROM_FILES)


def find_workload(name: str, path: Path | None = None) -> Workload:
    """The workload of that name. Raises InputError."""
    if path is not None and name in (TinyArithmetic.name, RandomTokens.name):
        raise InputError(
            f"workload {name} makes its own prompts and reads no file; leave --data (sweep.data) {path} out"
        )
    if name == TinyArithmetic.name:
        return TinyArithmetic()
    if name.partition("/")[0] == GSM8K:
        from tuning.gsm8k.workload import gsm8k_workload  # it is made of what is defined here

        return gsm8k_workload(name, None if path is None else str(path))
    if name == "random":
        return RandomTokens()
    one = name.startswith(CATEGORY)
    form, category = ("speed-bench", name.removeprefix(CATEGORY)) if one else (name, "")
    if form in FROM_FILES:
        if path is None:
            raise InputError(f"workload {name} reads its prompts from a file; name it with --data PATH")
        # A JSONL file of one's own is a workload of its own, by the file's name.
        return FromFile(path, path.stem if form == "jsonl" else name, _read(form, path, category))
    raise InputError(f"there is no workload {name!r}; known: {', '.join(WORKLOADS)}")


def sweep_workload(name: str, data: str | None = None) -> Workload:
    """The workload of a sweep: one with answers, on which k may be ranked. Raises InputError."""
    if name.partition("/")[0] not in WITH_ANSWERS:
        why = (
            "random tokens make acceptance meaningless, so they never rank k"
            if name == "random"
            else "a sweep needs answers"
        )
        known = f"known to a sweep: {', '.join(WITH_ANSWERS)}"
        raise InputError(f"sweep.workload: there is no workload {name!r} for a sweep ({why}); {known}")
    return find_workload(name, None if data is None else Path(data))
