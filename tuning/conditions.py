"""What else the machine did while something was measured: its load, temperatures and clocks, as drivers tell.

    before = snapshot(); ...; after = snapshot()

NVIDIA by NVML, AMD by its kernel driver's files, a CPU by /sys; what isn't told is left out, never guessed.
Times of a loaded or throttled machine aren't those of a quiet one; acceptance is the same on both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HWMON = Path("/sys/class/drm")
CPU = Path("/sys/devices/system/cpu")
THERMAL = Path("/sys/class/thermal")


def snapshot(drm: Path = HWMON, cpu: Path = CPU, thermal: Path = THERMAL) -> dict[str, Any]:
    """Facts of this moment. Degrees Celsius, MHz; `load_1_min` is the kernel's run queue average."""
    found: dict[str, Any] = {"load_1_min": round(os.getloadavg()[0], 2), "cores": os.cpu_count()}
    megahertz = [_number(p) for p in sorted(cpu.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))]
    celsius = [_number(p) for p in sorted(thermal.glob("thermal_zone*/temp"))]
    if known := [value / 1000 for value in megahertz if value is not None]:
        found["cpu_mhz"] = round(sum(known) / len(known))
    if known := [value / 1000 for value in celsius if value is not None]:
        found["cpu_celsius"] = max(known)
    gpus = _nvidia() or _amd(drm)
    return found | ({"gpus": gpus} if gpus else {})


def throttled(facts: dict[str, Any]) -> list[str]:
    """Sentences about GPUs whose clocks were being held back at that moment."""
    return [
        f"GPU {index}: clocks held back by {gpu['throttled_by']}"
        for index, gpu in enumerate(facts.get("gpus", []))
        if gpu.get("throttled_by")
    ]


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _amd(drm: Path) -> list[dict[str, Any]]:
    """amdgpu's hwmon files of each card: edge or junction temperature, and the shader clock."""
    found = []
    for folder in sorted(drm.glob("card[0-9]*/device/hwmon/hwmon*")):
        celsius, hertz = _number(folder / "temp2_input"), _number(folder / "freq1_input")
        gpu = {"celsius": celsius and celsius / 1000, "mhz": hertz and hertz / 1e6}
        if known := {name: value for name, value in gpu.items() if value is not None}:
            found.append(known)
    return found


# NVML's bits that mean slower than asked for: power cap, thermal (software, hardware), power brake.
_THROTTLES = {0x4: "power cap", 0x20: "temperature", 0x40: "temperature", 0x80: "power brake"}


def _nvidia() -> list[dict[str, Any]]:
    try:
        import pynvml
    except ImportError:
        return []
    found = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            held = dict.fromkeys(name for bit, name in _THROTTLES.items() if reasons & bit)
            found.append(
                {
                    "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                    "mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                    "throttled_by": ", ".join(held),
                }
            )
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, or a GPU that doesn't tell: a measurement doesn't end for it
        return []
    return found
