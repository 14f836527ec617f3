"""What a sweep calls to measure a configuration: an engine of known cost can stand in for a real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dspark_deploy.launch.engine import ReadyReport
from dspark_deploy.preflight import Facts
from dspark_deploy.profile import LoadedProfile
from tuning.accuracy import AccuracyRun
from tuning.measurement import Measurement, Plan


class Measurer(Protocol):
    """What measures one configuration: `tuning.measurement.measure`, or a stand-in of known cost."""

    def __call__(
        self,
        loaded: LoadedProfile,
        facts: Facts,
        plan: Plan,
        workload: Any,
        folder: Path,
        say: Any,
        extra: Sequence[str] = (),
    ) -> tuple[Measurement, AccuracyRun, ReadyReport]: ...
