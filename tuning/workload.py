"""Workloads: what the engine is asked while it is measured. Always real text, never random tokens.

A workload gives three disjoint kinds of prompts: for warming up, for each load level, and for accuracy,
where each has an answer. Random tokens would make acceptance meaningless, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark_deploy.errors import InputError
from dspark_deploy.tiny import language


@dataclass(frozen=True, slots=True)
class Question:
    """One accuracy problem: what is asked, and the right answer."""

    id: str
    prompt: str
    gold: str


class TinyArithmetic:
    """The built-in checkpoint's own language: word problems whose questions it has never seen."""

    name = "tiny-arithmetic"

    def warm_up_prompts(self, count: int) -> list[str]:
        """Prompts that no measurement uses."""
        return _prompts(language.WARM_UP_SEEDS[0], count)

    def load_prompts(self, load_index: int, count: int) -> list[str]:
        """Prompts for one load level. Levels differ, so that no level finds another's prefix cached."""
        return _prompts(language.LOAD_SEEDS[load_index], count)

    def questions(self, count: int) -> list[Question]:
        """Held-out problems with their answers."""
        drawn = language.problems(language.ACCURACY_SEEDS[0], count)
        return [Question(f"arithmetic-{i}", language.prompt(p), str(p.answer)) for i, p in enumerate(drawn)]

    def answer(self, text: str) -> str | None:
        """The answer that a completion gives, or None where it gives none."""
        found = language.final_answer(text)
        return None if found is None else str(found)


def _prompts(seed: int, count: int) -> list[str]:
    return [language.prompt(problem) for problem in language.problems(seed, count)]


WORKLOADS = {TinyArithmetic.name: TinyArithmetic}


def find_workload(name: str) -> TinyArithmetic:
    """The workload of that name. Raises InputError."""
    if name not in WORKLOADS:
        raise InputError(f"sweep.workload: there is no workload {name!r}; known: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]()
