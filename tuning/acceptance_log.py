"""Acceptance from vLLM's own log lines, for an engine whose `/metrics` nobody scraped.

    dspark-tune acceptance --log engine.log

A line covers one interval, of ten seconds as a rule. Lines are pooled by their drafts, which are the drafted
tokens over the positions: right for a fixed k, and for nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path

from dspark_deploy.errors import InputError
from dspark_deploy.launch.log import log_lines
from tuning.acceptance import Acceptance

LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: (?P<length>[\d.]+).*?"
    r"Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens, "
    r"Per-position acceptance rate: (?P<rates>[\d., ]+?), Avg Draft"
)


def read_line(line: str) -> Acceptance | None:
    """What one log line says; None for any other line. Counts by position carry the rates' rounding."""
    match = LINE.search(line)
    if match is None:
        return None
    rates = [float(rate) for rate in match["rates"].split(",")]
    drafted = int(match["drafted"])
    drafts = round(drafted / len(rates))
    return Acceptance(drafts, drafted, int(match["accepted"]), tuple(round(r * drafts) for r in rates))


def read_log(path: Path) -> Acceptance:
    """All lines of a log, pooled. Raises InputError where there is none, or k changes between them."""
    found = []
    try:
        for number, line in enumerate(log_lines(path), 1):
            try:
                acceptance = read_line(line)
            except (ValueError, OverflowError) as error:  # a line that was cut off, or written over
                raise InputError(
                    f"{path}:{number}: its numbers can't be read ({error}); remove it"
                ) from error
            if acceptance is not None:
                found.append(acceptance)
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}; name the engine's log") from error
    widths = {len(one.per_position) for one in found}
    if not found:
        raise InputError(
            f"{path}: has no line 'SpecDecoding metrics'; serve with speculation, and send it requests"
        )
    if len(widths) > 1:
        raise InputError(
            f"{path}: holds runs of k = {', '.join(map(str, sorted(widths)))}; give one run's log"
        )
    return sum(found[1:], found[0])
