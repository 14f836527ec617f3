"""A sweep on a stand-in engine, whole but for the engine: from a profile's text to the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark_deploy.preflight import Facts
from tests.support.stand_in import StandIn
from tests.unit.facts import good_facts
from tests.unit.profiles import TEXT, load
from tuning.campaign import Campaign
from tuning.conclusion import conclude
from tuning.opening import Options

SWEEP = (
    TEXT
    + """\
sweep:
  space:
    num_speculative_tokens: [none, 1, 3, 5]
  loads: [1, 8]
  boots: 0
"""
)


@dataclass
class Swept:
    """A sweep that has ended: its campaign, engine, printed lines and result."""

    campaign: Campaign
    engine: StandIn
    text: str
    result: dict[str, Any]


def make(
    folder: Path,
    engine: StandIn,
    text: str = SWEEP,
    sets: list[str] | None = None,
    facts: Facts | None = None,
    name: str = "out",
    **options: Any,
) -> Campaign:
    """A campaign that has not begun."""
    out = folder / name
    out.mkdir(exist_ok=True)
    console = Console(record=True, width=200, file=(folder / "console").open("a"))
    loaded = load(folder, text, sets)
    return Campaign(loaded, facts or good_facts(), out, Options(**options), console, engine)


def sweep(folder: Path, engine: StandIn | None = None, *args: Any, **options: Any) -> Swept:
    """Run a sweep to its end."""
    engine = engine or StandIn()
    campaign = make(folder, engine, *args, **options)
    campaign.run()
    result = conclude(campaign, report=False)
    return Swept(campaign, engine, campaign.console.export_text(), result)
