"""Values that look like secrets are hidden, and ordinary ones stay as they are."""

from __future__ import annotations

import json

import pytest

from dspark_deploy.redaction import (
    REDACTED,
    is_secret,
    mask_assignment,
    mask_credentials,
    mask_text,
    redacted,
)

PLANTED = "hunter2hunter2hunter2"
SECRETS = [
    "hf_abcdefghijklmnopqrstuvwxyz012345",
    f"sk-proj-{PLANTED}",
    f"ghp_{PLANTED}",
    "AKIAIOSFODNN7EXAMPLE",
    f"eyJhbGciOiJI.{PLANTED}.abc",
    f"-----BEGIN RSA PRIVATE KEY-----\n{PLANTED}\n-----END RSA PRIVATE KEY-----",
    f"api-key={PLANTED}",
    f"x=1,api-key={PLANTED},y=2",
    f"host=x password={PLANTED}",
    f"host=x password='{PLANTED} and more'",
    f"Authorization: Bearer {PLANTED}",
    f"Authorization: Basic {PLANTED}",
    f"Authorization=Bearer%20{PLANTED}",
    f"X-Api-Key: {PLANTED}",
    f"bearer {PLANTED}",
    f"user:{PLANTED}@host:80",
    f"http://user:{PLANTED}@host",
    f"--seed 1 --api-key {PLANTED}",
    json.dumps({"token": PLANTED}),
    json.dumps([{"a": {"password": PLANTED}}]),
    json.dumps({"url": f"http://u:{PLANTED}@h"}),
    f"{{token: {PLANTED}}}",
    "{'a': 1, 'token': '" + PLANTED + "'}",
]
ORDINARY = [
    "",
    "1",
    "0.9",
    "true",
    "/models/DeepSeek-V4-Flash-0731",
    "/opt/auth:/opt/keys:/usr/lib",
    "deepseek-ai/DeepSeek-V4-Flash-0731",
    "vllm/vllm-openai-rocm:v0.33.0",
    "registry:5000/rocm:v1@sha256:0123456789abcdef",
    ">=0.26,<0.34",
    "0.33.0+rocm",
    "http://collector:4317/v1/traces?limit=5",
    "git@github.com:vllm-project/vllm",
    "mailto:me@host",
    "expandable_segments:True,max_split_size_mb:128",
    "max_tokens=5 tokenizer=hf author=me",
    "--max-num-seqs 8 --tokenizer-mode hf",
    '{"mode": 3, "cudagraph_mode": "FULL", "num_key_value_heads": 8}',
    "{mode: 3}",
    "FULL_DECODE_ONLY",
    "password=${PASSWORD}",
    "Authorization: Bearer ${TOKEN}",
    "user:${PASSWORD}@host:80",
    "127.0.0.1:8000",
    "hf_transfer",
    "a tokenizer, a key and a bearer",
]


@pytest.mark.parametrize("value", SECRETS)
def test_a_value_that_looks_like_a_secret_is_hidden(value: str) -> None:
    planted = PLANTED if PLANTED in value else value
    for shown in (mask_text(value), mask_assignment(f"engine.env.FOO={value}"), str(redacted([value]))):
        assert planted not in shown and "<redacted>" in shown


@pytest.mark.parametrize("value", ORDINARY)
def test_an_ordinary_value_stays(value: str) -> None:
    assert mask_text(value) == value and redacted({"FOO": value}) == {"FOO": value}


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "api-key", "MYPW", "SESSION", "SESSION_ID", "MYSQL_PWD", "Authorization"]
)
def test_a_name_says_that_it_is_a_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["author", "PWD", "OLDPWD", "SESSION_TIMEOUT", "max_tokens", "num_key_heads", "PATH"]
)
def test_a_name_that_says_no_secret(name: str) -> None:
    assert not is_secret(name)


def test_a_word_that_assigns_nothing_is_hidden_as_well() -> None:
    assert PLANTED not in mask_assignment(f"http://u:{PLANTED}@h") + mask_assignment(
        f"http://u:{PLANTED}@h/?a=1"
    )


def test_json_too_deep_to_read_is_searched_as_text() -> None:
    assert PLANTED not in mask_text("[" * 100_000 + f'{{"token": "{PLANTED}"}}')


def test_a_message_hides_issued_keys_and_leaves_the_rest():
    """What a message says of a setting whose name is a secret's stays: only what is surely a key goes."""
    said = "profile.yaml:3: engine.env.API_KEY: is no text; the log says Authorization: Bearer abc.def"
    assert mask_credentials(f"{said} hf_{'a' * 20}") == said.replace("abc.def", REDACTED) + f" {REDACTED}"
