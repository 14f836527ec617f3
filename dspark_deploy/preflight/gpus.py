"""The GPUs of this machine, from the kernel drivers, amdsmi and NVML; no torch, and no vendor command is run.

AMD's kernel driver says all but the product's name, which tells MI350X from MI355X and MI300X from MI325X.
The name is amdsmi's, where ROCm's Python package is installed: it adds to what the driver has, no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
ROCM_VERSION = Path("/opt/rocm/.info/version")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpus:
    """One entry per GPU in each list that the driver can fill; `platform` is `rocm`, `cuda` or empty."""

    platform: str = ""
    architectures: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    memory_gib: list[float] = field(default_factory=list)
    wavefront: int | None = None
    rocm: str = ""


def probe_gpus(nodes: Path = KFD_NODES, nvidia: Path = NVIDIA_GPUS, version: Path = ROCM_VERSION) -> Gpus:
    """AMD's GPUs where its driver shows any, else NVIDIA's."""
    found = _amd(nodes, version)
    return found if found.platform else _nvidia(nvidia)


def _amd(nodes: Path, version: Path) -> Gpus:
    """The KFD topology in sysfs: architecture, wavefront and memory of each node that is a GPU."""
    architectures, memory, wavefronts = [], [], set()
    for node in sorted(nodes.glob("*"), key=lambda path: int(path.name) if path.name.isdigit() else -1):
        values = _properties(node / "properties")
        target = values.get("gfx_target_version", 0)
        if not target:  # a CPU
            continue
        # 90402 is gfx942: major, minor, and the stepping in hexadecimal.
        architectures.append(f"gfx{target // 10000}{target // 100 % 100}{target % 100:x}")
        wavefronts.add(values.get("wave_front_size", 64))
        banks = (_properties(bank) for bank in node.glob("mem_banks/*/properties"))
        memory.append(round(sum(bank.get("size_in_bytes", 0) for bank in banks) / GIB, 1))
    if not architectures:
        return Gpus()
    rocm = version.read_text().strip() if version.is_file() else ""
    names = _amd_names()
    return Gpus(
        "rocm",
        architectures,
        names if len(names) == len(architectures) else [],  # some are hidden from one of the two
        memory if all(memory) else [],  # a container can hide them, which is not knowing
        max(wavefronts),
        rocm,
    )


def _amd_names() -> list[str]:
    """Product names by amdsmi, in its order; none where it isn't installed or can't reach the driver."""
    try:
        import amdsmi
    except ImportError:
        return []
    except (OSError, KeyError):  # the package is there, and the library that it loads is not
        return []
    try:
        amdsmi.amdsmi_init()
        try:
            handles = amdsmi.amdsmi_get_processor_handles()
            return [str(amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]) for handle in handles]
        finally:
            amdsmi.amdsmi_shut_down()
    except amdsmi.AmdSmiException:
        return []


def _properties(path: Path) -> dict[str, int]:
    """Lines of a name and a whole number. Containers can make files unreadable; those are left out."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _nvidia(folder: Path) -> Gpus:
    """What NVML says where its Python binding is installed; else what the kernel driver has under /proc."""
    try:
        import pynvml
    except ImportError:
        return _nvidia_driver(folder)
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        capabilities = [pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        memory = [round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB, 1) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, or a GPU that has fallen off the bus
        return _nvidia_driver(folder)
    return Gpus("cuda", [f"sm{major}{minor}" for major, minor in capabilities], names, memory)


def _nvidia_driver(folder: Path) -> Gpus:
    found = sorted(folder.glob("*/information"))
    models = [line for path in found for line in path.read_text().splitlines() if line.startswith("Model:")]
    names = [line.partition(":")[2].strip() for line in models]
    return Gpus("cuda" if found else "", ["nvidia"] * len(found), names)
