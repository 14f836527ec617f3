"""What a vLLM process is told by the command that started it: one JSON file, named by one variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

SETTINGS_ENV = "DSPARK_DEPLOY_SETTINGS"


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved settings of one launch.

    `platform` is the one the profile is for (`cpu`, `rocm`, `cuda`); patches that are not for it say so.
    `report_dir` is where each process writes its own JSON. `cpu_twins` switches the CPU engine's twins
    of Triton kernels; without them every kernel goes to Triton's interpreter. `mhc_provider`, `mhc_gate`
    and `jit_guard` are the profile's `mhc.provider`, `mhc.gate` and `jit.guard`.
    """

    platform: str
    report_dir: Path
    cpu_twins: bool = True
    mhc_provider: str = "auto"
    mhc_gate: str = "refuse"
    jit_guard: str = "warn"

    def write(self, path: Path) -> None:
        """Write to `path`, for `read` in another process."""
        path.write_text(json.dumps({**asdict(self), "report_dir": str(self.report_dir)}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read what `write` wrote. Unknown keys are refused: they mean two versions of this package."""
        data = json.loads(path.read_text())
        data["report_dir"] = Path(data["report_dir"])
        return cls(**data)

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings of this process. Raises KeyError outside a launch of ours."""
        return cls.read(Path(os.environ[SETTINGS_ENV]))
