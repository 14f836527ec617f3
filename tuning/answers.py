"""An accuracy run in a few bytes a question, so that it travels in its trial and any worker can compare.

    [["q0", 1, "answered", "9f86d081884c7d65"], ...]      id, right or wrong, state, hash of the text

Equal hashes are taken for equal texts. The texts themselves stay in the cell's folder of the worker that
asked. Not covered: tokens and histograms, which no comparison between configurations needs.
"""

from __future__ import annotations

import hashlib
import json

from dspark_deploy.plain_json import parse_json
from tuning.accuracy import AccuracyRun, Item

HASH_CHARACTERS = 16


def pack(run: AccuracyRun) -> str:
    """The run as a short JSON text."""
    rows = [[item.id, int(item.correct), item.state, _hash(item.text)] for item in run.items]
    return json.dumps(rows, separators=(",", ":"))


def unpack(text: str) -> AccuracyRun:
    """What `pack` gave, each item's text being its hash. Raises ValueError or TypeError."""
    return AccuracyRun(
        [
            Item(id=name, gold="", answer=None, correct=bool(correct), state=state, text=digest)
            for name, correct, state, digest in parse_json(text)
        ]
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
