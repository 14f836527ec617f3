"""Where `dspark-tune` begins; see `dspark_deploy.beginning`."""

from __future__ import annotations

from dspark_deploy.beginning import begin


def tune() -> None:
    """Entry point of `dspark-tune`."""
    begin("dspark-tune", "tuning.sweep")
