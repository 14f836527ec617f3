"""A small profile for tests, as text and loaded."""

from __future__ import annotations

from pathlib import Path

from dspark_deploy.profile import LoadedProfile, load_profile

TEXT = """\
name: test
model: {path: /models/target}
hardware: {platform: cpu}
engine:
  vllm: ">=0.26"
  port: 8123
speculative:
  draft: /models/draft
  num_speculative_tokens: 5
"""


def write(folder: Path, text: str = TEXT, name: str = "test.yaml") -> Path:
    """Write a profile into `folder`."""
    path = folder / name
    path.write_text(text)
    return path


def load(folder: Path, text: str = TEXT, sets: list[str] | None = None) -> LoadedProfile:
    """Write and load a profile."""
    return load_profile(write(folder, text), sets or [])
