"""The tokenizer takes any text and gives it back; its files mean the same to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from dspark_deploy.tiny.checkpoint import checkpoint_path
from dspark_deploy.tiny.language import ACCURACY_SEEDS, problems, prompt
from dspark_deploy.tiny.tokenizer import (
    EOS,
    MASK,
    PAD,
    SPECIAL_TOKENS,
    TRAINING_SEED,
    VOCABULARY,
    build_tokenizer,
    save_tokenizer,
)

TOKENIZER = build_tokenizer(TRAINING_SEED)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    coded = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(coded, skip_special_tokens=False) == text
    assert all(token < VOCABULARY for token in coded)


@given(st.integers(0, 10**9))
def test_every_digit_is_one_token(number: int) -> None:
    assert len(TOKENIZER.encode(str(number)).ids) == len(str(number))


def test_prompt_and_solution_encode_apart_as_they_do_together() -> None:
    for problem in problems(ACCURACY_SEEDS[0], 50):
        before, after = TOKENIZER.encode(prompt(problem)).ids, TOKENIZER.encode(f" {problem.solution}").ids
        assert TOKENIZER.encode(f"{prompt(problem)} {problem.solution}").ids == before + after


def test_training_it_again_gives_the_shipped_one() -> None:
    for name in ("tiny-qwen3/target", "tiny-qwen3/draft"):
        assert (checkpoint_path(name) / "tokenizer.json").read_text() == TOKENIZER.to_str(pretty=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(TOKENIZER, folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_transformers_loads_it_with_its_special_tokens(loaded: Any) -> None:
    assert loaded.convert_tokens_to_ids(SPECIAL_TOKENS) == [PAD, EOS, MASK]
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.mask_token_id) == (PAD, EOS, MASK)
    assert len(loaded) == VOCABULARY
    text = problems(ACCURACY_SEEDS[0], 1)[0].solution
    assert loaded(text).input_ids == TOKENIZER.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text


def test_chat_template_gives_the_prompt_that_training_used(loaded: Any) -> None:
    problem = problems(ACCURACY_SEEDS[0], 1)[0]
    messages = [{"role": "user", "content": problem.question}]
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == prompt(problem)
