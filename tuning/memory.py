"""Out of memory under load: which one setting to lower, once, and on what evidence.

    frames of the sampler, the rejection or the draft    max-num-seqs: their tensors have a row per request
    any other frame                                      max-num-batched-tokens: a row per token of a step
    the setting that would be lowered is vLLM's default  gpu-memory-utilization: room beside the KV cache

An engine that runs out while it starts is not this module's affair: the configuration does not fit, and has
failed. Not covered: memory of the host that other processes took.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_deploy.profile import LoadedProfile

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP) out of memory|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|can't allocate memory|std::bad_alloc"
)
FRAME = re.compile(r'File "([^"]+)", line \d+')
BY_REQUEST = re.compile(r"sampl|reject|logits|spec_decode|speculat|draft")
FRAMES = 40  # lines before the error that hold its traceback
TAIL = 1_000_000
SEQUENCES, TOKENS, UTILIZATION = "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization"
DEFAULT_UTILIZATION, LESS = 0.92, 0.05


@dataclass(frozen=True, slots=True)
class Lowered:
    """One setting of `engine.args`, before and after; `evidence` is the log's line, `why` the reason."""

    setting: str
    before: float
    after: float
    why: str
    evidence: str

    def changes(self, loaded: LoadedProfile) -> dict[str, Any]:
        """What differs from the profile, by dotted path."""
        return {"engine.args": {**loaded.profile.engine.args, self.setting: self.after}}

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, which trials and results keep."""
        return asdict(self)


def lowered(loaded: LoadedProfile, log: Path) -> Lowered | None:
    """What to lower for an engine that ended under load; None where its log doesn't speak of memory."""
    lines = _tail(log)
    last = next((i for i in range(len(lines) - 1, -1, -1) if OUT_OF_MEMORY.search(lines[i])), None)
    if last is None:
        return None
    frames = [found[1] for line in lines[max(last - FRAMES, 0) : last] if (found := FRAME.search(line))]
    by_request = any(BY_REQUEST.search(frame.partition("vllm/")[2]) for frame in frames[-6:])
    evidence = lines[last].strip()[:300]
    args = loaded.profile.engine.args
    setting = SEQUENCES if by_request else TOKENS
    rows = "request" if by_request else "token"
    before = args.get(setting)
    if isinstance(before, int) and before > 1:
        why = f"it ran out in {frames[-1] if frames else 'an unnamed frame'}: a row per {rows} of a step"
        return Lowered(setting, before, before // 2, why, evidence)
    share = args.get(UTILIZATION, DEFAULT_UTILIZATION)
    if loaded.profile.hardware.platform == "cpu" or not isinstance(share, float) or share <= 2 * LESS:
        return None
    why = f"{setting} is vLLM's own choice, so the KV cache leaves more room"
    return Lowered(UTILIZATION, share, round(share - LESS, 3), why, evidence)


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - TAIL))
            return handle.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
