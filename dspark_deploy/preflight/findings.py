"""A finding: what the preflight has to say about one thing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """An `error` refuses the launch; a `warning` is likely to cost something; a `note` is worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """`where` is file:line in the profile, or empty; `remedy` is what to do or type; `source` is public."""

    code: str
    severity: Severity
    message: str
    remedy: str
    where: str = ""
    source: str = ""

    def as_json(self) -> dict[str, Any]:
        """The finding as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        source = f" ({self.source})" if self.source else ""
        return f"{place}{self.severity}: {self.code}: {self.message}{source}\n    {self.remedy}"
