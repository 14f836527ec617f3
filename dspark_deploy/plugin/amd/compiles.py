"""Every kernel compile of this process: its phase, its key, and whether it may happen.

    load       until the models are loaded
    warm-up    from there to readiness, outside capture
    capture    while graphs are captured, the eager pass before each of them included
    serving    after readiness

In mode `error` a compile in capture or serving is refused, with kernel, key and token count; in `warn` it is
logged once per key; `off` installs nothing. Counting costs nothing per step: these functions run when a
kernel is missing from its cache, and never when it is there.

No torch here: the hooks on TileLang, Triton and AITER are in `capture_guard`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

logger = logging.getLogger("vllm.dspark_deploy.jit")
# More records than this mean a fault, and would make every process report large.
MOST_RECORDS = 500


class Phase(StrEnum):
    """Where in a worker's life a compile happened."""

    LOAD = "load"
    WARMUP = "warm-up"
    CAPTURE = "capture"
    SERVING = "serving"


GUARDED = (Phase.CAPTURE, Phase.SERVING)


class CompileRefusedError(RuntimeError):
    """A kernel was to be compiled in capture or after readiness, and `jit.guard` is `error`."""


@dataclass(slots=True)
class Compile:
    """One compile. `tokens` is 0 where it can't be told. `source` is `compiled` or `disk`."""

    library: str
    kernel: str
    key: str
    tokens: int
    phase: Phase
    seconds: float = 0.0
    source: str = "disk"

    def line(self) -> str:
        """The log line that `dspark-tune jit-log` reads."""
        return (
            f"dspark-deploy jit: library={self.library} kernel={self.kernel} phase={self.phase} "
            f"tokens={self.tokens} seconds={self.seconds:.2f} source={self.source} key={self.key}"
        )


class Compiles:
    """The compiles of one process. One instance serves the process, see `process_compiles`."""

    def __init__(self, guard: str = "warn") -> None:
        self.guard = guard
        self.phase = Phase.LOAD
        self.records: list[Compile] = []
        self.refused = 0
        self.changed: Callable[[], None] = lambda: None
        self._counts: dict[tuple[str, str], int] = {}
        self._logged: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._local = threading.local()

    def enter(self, phase: Phase) -> None:
        """Begin a phase. Compiles from here on are counted in it."""
        self.phase = phase
        self.changed()

    @property
    def current(self) -> Compile | None:
        """The compile that this thread is in."""
        return getattr(self._local, "current", None)

    @contextlib.contextmanager
    def watch(self, library: str, kernel: str, key: str, tokens: int) -> Iterator[Compile]:
        """Around one compile. Raises CompileRefusedError before it begins, where it may not happen."""
        compile_ = Compile(library, kernel, key, tokens, self.phase)
        self.allow(compile_)
        outer, self._local.current = self.current, compile_
        started = time.perf_counter()
        try:
            yield compile_
        finally:
            self._local.current = outer
            compile_.seconds = round(time.perf_counter() - started, 3)
        self.add(compile_)

    def allow(self, compile_: Compile) -> None:
        """Raises CompileRefusedError if this compile may not begin now."""
        if self.guard != "error" or compile_.phase not in GUARDED:
            return
        self.refused += 1
        when = "while graphs were captured" if compile_.phase is Phase.CAPTURE else "after readiness"
        message = (
            f"dspark-deploy: refused to compile {compile_.library} kernel {compile_.kernel} {when}: "
            f"key {compile_.key}, {compile_.tokens} tokens. The warm-up has missed this key. Serve on with "
            f"--set jit.guard=warn, and report kernel, key and token count"
        )
        logger.error("%s refused=1", compile_.line())
        self.changed()
        raise CompileRefusedError(message)

    def add(self, compile_: Compile) -> None:
        """Count a finished compile, and log it."""
        with self._lock:
            count = (str(compile_.phase), compile_.source)
            self._counts[count] = self._counts.get(count, 0) + 1
            if len(self.records) < MOST_RECORDS:
                self.records.append(compile_)
            name = (compile_.kernel, compile_.key)
            first = name not in self._logged
            self._logged.add(name)
        if compile_.phase in GUARDED:
            if first:
                logger.warning("%s", compile_.line())
            self.changed()
        else:
            logger.info("%s", compile_.line())

    def as_json(self) -> dict[str, Any]:
        """For the process report: counts by phase, cache hits apart, and the records."""
        compiled = {str(phase): self._counts.get((str(phase), "compiled"), 0) for phase in Phase}
        loaded = {str(phase): self._counts.get((str(phase), "disk"), 0) for phase in Phase}
        return {
            "guard": self.guard,
            "phase": str(self.phase),
            "compiled": compiled,
            "from_disk": loaded,
            "refused": self.refused,
            "records": [asdict(record) for record in self.records],
        }


process_compiles = Compiles()
