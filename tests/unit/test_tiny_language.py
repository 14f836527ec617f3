"""The arithmetic language: what it says is right, and no problem serves two purposes."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_deploy.tiny.language import (
    ACCURACY_SEEDS,
    LARGEST,
    LOAD_SEEDS,
    TRAINING_SEEDS,
    WARM_UP_SEEDS,
    Problem,
    _part,
    final_answer,
    problems,
    prompt,
)

PURPOSES = (TRAINING_SEEDS, ACCURACY_SEEDS, LOAD_SEEDS, WARM_UP_SEEDS)
seeds = st.integers(min(TRAINING_SEEDS), max(WARM_UP_SEEDS))


@given(seeds)
def test_solution_works_out_the_question(seed: int) -> None:
    for problem in problems(seed, 3):
        count, *changes = (int(number) for number in re.findall(r"\d+", problem.question))
        verbs = re.findall(r"(\w+) \d+\.", problem.question)
        equations = re.findall(r"(\d+)([+-])(\d+)=(\d+)\.", problem.solution)
        assert len(equations) == len(changes) == problem.operations
        for (before, sign, change, after), asked, verb in zip(equations, changes, verbs, strict=True):
            assert (int(before), int(change)) == (count, asked)
            assert sign == ("+" if verb in {"buys", "finds", "wins", "gets"} else "-")
            count = count + asked if sign == "+" else count - asked
            assert int(after) == count
            assert 0 <= count <= LARGEST
        assert problem.answer == count


@given(seeds)
def test_answer_is_read_back_from_whatever_follows_the_solution(seed: int) -> None:
    problem = problems(seed, 1)[0]
    assert final_answer(problem.solution) == problem.answer
    assert final_answer(f" {problem.solution}\n\nQ: Tom has 5 pens.\n#### 7") == problem.answer
    assert prompt(problem) == f"Q: {problem.question}\nA:"


@given(
    st.integers(),
    st.sampled_from(["", " ", "  ", "\t", " $", "$"]),
    st.sampled_from(["", ".", "\n", "<eos>", " x"]),
)
def test_final_answer_reads_any_integer(number: int, before: str, after: str) -> None:
    assert final_answer(f"so it is 3.\n####{before}{number}{after}") == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 1,234", 1234),
        ("#### 12 #### 13", 12),
        ("21+13=34", None),
        ("", None),
        ("####", None),
        ("####\n25", None),
        ("#### none, so 3", None),
        ("#### 2.5", None),
        ("#### 12,34", None),
    ],
)
def test_final_answer_edges(text: str, answer: int | None) -> None:
    assert final_answer(text) == answer


@given(st.text())
def test_final_answer_takes_any_text(text: str) -> None:
    assert final_answer(text) is None or "####" in text


def test_seed_ranges_are_disjoint_and_other_seeds_are_refused() -> None:
    for earlier, later in pairwise(PURPOSES):
        assert earlier.stop <= later.start
    for outside in (TRAINING_SEEDS.start - 1, WARM_UP_SEEDS.stop):
        with pytest.raises(ValueError, match=f"seed {outside}"):
            problems(outside, 1)


def test_no_question_can_serve_two_purposes() -> None:
    parts = [{_part(problem.question) for problem in problems(purpose[0], 300)} for purpose in PURPOSES]
    assert sum(len(own) for own in parts) == len(set.union(*parts))


@given(seeds)
def test_problems_of_a_seed_are_distinct_and_a_longer_draw_begins_like_a_shorter_one(seed: int) -> None:
    drawn = problems(seed, 40)
    assert len({problem.question for problem in drawn}) == 40
    assert problems(seed, 15) == drawn[:15]


def test_a_seed_means_the_same_problems_for_ever() -> None:
    assert problems(ACCURACY_SEEDS[0], 1) == [
        Problem(
            question="At first Sam has 18 cards. Sam gives 3. Sam eats 3. How many cards now?",
            solution="Sam gives 3, so 18-3=15. Sam eats 3, so 15-3=12.\n#### 12",
            answer=12,
            operations=2,
        )
    ]


def test_importing_the_language_imports_no_torch() -> None:
    code = (
        "import sys, dspark_deploy.tiny.language, dspark_deploy.tiny.checkpoint;"
        "print({'torch', 'tokenizers', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
