"""The tiny checkpoint's tokenizer: a byte-level BPE of 352 tokens, trained on the language.

Encodes any text and gives it back exactly. Every digit is a token of its own, which is what lets a model this
small learn to carry. The chat template turns a user's message into the same "Q: ...\\nA:" that training uses.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark_deploy.tiny.language import TRAINING_SEEDS, prompt, stream

VOCABULARY = 352
PAD, EOS, MASK = 0, 1, 2
"""Padding, end of text, and the token that fills the draft's block where nothing is known yet."""
SPECIAL_TOKENS = ["<pad>", "<eos>", "<mask>"]
TRAINING_SEED, TRAINING_TEXTS = TRAINING_SEEDS[2], 1500

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Q: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}A: {{ message['content'] }}\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def build_tokenizer(seed: int) -> Tokenizer:
    """Train the tokenizer on the problems of `seed`. The same seed gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[0-9]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{prompt(problem)} {problem.solution}" for problem in islice(stream(seed), TRAINING_TEXTS))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that transformers and vLLM load a tokenizer from."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "eos_token": SPECIAL_TOKENS[EOS],
        "mask_token": SPECIAL_TOKENS[MASK],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
