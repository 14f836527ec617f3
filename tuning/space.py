"""The search space: which engine configurations a sweep measures, and what each changes in the profile."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from dspark_deploy.profile import LoadedProfile
from dspark_deploy.profile.schema import SpaceSettings


@dataclass(frozen=True, slots=True)
class Configuration:
    """One engine configuration. Without speculation, k is 0 and the draft has no sampling method."""

    num_speculative_tokens: int
    draft_sample_method: str | None = None

    @property
    def label(self) -> str:
        """Short and unique: `none`, `k5-greedy`. Also the name of its files."""
        if self.num_speculative_tokens == 0:
            return "none"
        return f"k{self.num_speculative_tokens}-{self.draft_sample_method}"

    def apply(self, loaded: LoadedProfile) -> LoadedProfile:
        """The profile with this configuration in it, on a free port."""
        if self.num_speculative_tokens == 0:
            return loaded.revised({"speculative": None, "engine.port": 0})
        return loaded.revised({**self.changes(), "engine.port": 0})

    def changes(self) -> dict[str, Any]:
        """What differs from the profile, by dotted path."""
        if self.num_speculative_tokens == 0:
            return {"speculative": None}
        return {
            "speculative.num_speculative_tokens": self.num_speculative_tokens,
            "speculative.draft_sample_method": self.draft_sample_method,
        }

    def params(self) -> dict[str, Any]:
        """The configuration as optuna's parameters."""
        if self.num_speculative_tokens == 0:
            return {"num_speculative_tokens": 0}
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "draft_sample_method": self.draft_sample_method,
        }


REFERENCE = Configuration(0)


def configurations(space: SpaceSettings) -> list[Configuration]:
    """Every configuration, in the order of measurement.

    No speculation comes first whether it is in the space or not: it is what accuracy is compared with.
    Then the largest k, whose cost decides most, and so on downwards.
    """
    numbers = sorted({k for k in space.num_speculative_tokens if isinstance(k, int)}, reverse=True)
    methods = list(dict.fromkeys(space.draft_sample_method))
    return [REFERENCE, *(Configuration(k, method) for k in numbers for method in methods)]


def fingerprint(document: Any) -> str:
    """A short hash of plain JSON values, the same for the same values in any order of keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
