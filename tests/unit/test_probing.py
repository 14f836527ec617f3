"""Facts of machines that are not here: KFD's sysfs, NVML, caches on shared disks, vLLM's sources."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_deploy.preflight import caches
from dspark_deploy.preflight.caches import probe_caches
from dspark_deploy.preflight.gpus import GIB, probe_gpus
from dspark_deploy.preflight.vllm_build import PROBES, features, flags, variables, vllm_folder


def kfd_node(folder: Path, number: int, target: int, memory: int = 0) -> None:
    node = folder / str(number)
    (node / "mem_banks" / "0").mkdir(parents=True)
    (node / "properties").write_text(
        f"cpu_cores_count 0\nwave_front_size 64\ngfx_target_version {target}\nx\n"
    )
    (node / "mem_banks" / "0" / "properties").write_text(f"heap_type 1\nsize_in_bytes {memory}\n")


def test_amd_gpus_from_sysfs(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    kfd_node(nodes, 0, 0)
    kfd_node(nodes, 2, 90500, 288 * GIB)
    kfd_node(nodes, 10, 90402, 192 * GIB)
    version = tmp_path / "version"
    version.write_text("7.2.0-43\n")
    found = probe_gpus(nodes, tmp_path, version)
    assert found.platform == "rocm" and found.architectures == ["gfx950", "gfx942"]
    assert found.memory_gib == [288.0, 192.0] and found.wavefront == 64 and found.rocm == "7.2.0-43"


class AmdSmiError(Exception):
    """Stands for amdsmi's base exception."""


def amdsmi(names: list[str], fails: str = "") -> SimpleNamespace:
    """A stand-in for ROCm's package: these products, or a call that fails."""

    def call(name: str, value: object) -> object:
        def answer(*_: object) -> object:
            if name == fails:
                raise AmdSmiError(name)
            return value

        return answer

    return SimpleNamespace(
        AmdSmiException=AmdSmiError,
        amdsmi_init=call("amdsmi_init", None),
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=call("amdsmi_get_processor_handles", list(range(len(names)))),
        amdsmi_get_gpu_asic_info=lambda handle: {"market_name": names[handle]},
    )


@pytest.mark.parametrize(
    ("stand_in", "names"),
    [
        (amdsmi(["AMD Instinct MI355X", "AMD Instinct MI355X"]), ["AMD Instinct MI355X"] * 2),
        (amdsmi(["AMD Instinct MI355X"]), []),  # one that the driver shows is hidden from amdsmi
        (amdsmi(["AMD Instinct MI355X"] * 2, "amdsmi_init"), []),
        (amdsmi(["AMD Instinct MI355X"] * 2, "amdsmi_get_processor_handles"), []),
        (None, []),
    ],
)
def test_amd_products_are_named_by_amdsmi_where_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Any, names: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", stand_in)
    for number in (1, 2):
        kfd_node(tmp_path / "nodes", number, 90500, 288 * GIB)
    found = probe_gpus(tmp_path / "nodes", tmp_path, tmp_path / "none")
    assert found.names == names and found.architectures == ["gfx950", "gfx950"]


def test_a_gpu_that_nvml_cannot_reach_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = type("NVMLError", (Exception,), {})

    def fall_off(_: int) -> None:
        raise lost

    nvml = SimpleNamespace(
        NVMLError=lost,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=fall_off,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert probe_gpus(tmp_path / "none", tmp_path, tmp_path / "none").platform == ""


def test_no_gpu_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert probe_gpus(tmp_path, tmp_path, tmp_path / "none").platform == ""


def test_nvidia_gpus_from_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=140 * GIB),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = probe_gpus(tmp_path, tmp_path, tmp_path / "none")
    assert found.platform == "cuda" and found.architectures == ["sm90"] and found.names == ["NVIDIA H200"]
    assert found.memory_gib == [140.0]


def test_nvidia_gpus_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text("Model: \t NVIDIA H200\nIRQ: 1\n")
    found = probe_gpus(tmp_path / "none", tmp_path, tmp_path / "none")
    assert found.platform == "cuda" and found.architectures == ["nvidia"] and found.names == ["NVIDIA H200"]


def test_locks_are_stale_when_nobody_touches_them(tmp_path: Path) -> None:
    build = tmp_path / "build"
    build.mkdir()
    for name in ("lock_module_mhc", "lock_module_new", "module.so"):
        (build / name).touch()
    old = time.time() - caches.STALE_LOCK_S - 60
    os.utime(build / "lock_module_mhc", (old, old))
    os.utime(build / "module.so", (old, old))
    found = {cache.variable: cache for cache in probe_caches({"AITER_JIT_DIR": str(tmp_path)})}
    assert found["AITER_JIT_DIR"].stale_locks == [str(build / "lock_module_mhc")]
    assert found["AITER_JIT_DIR"].free_gib > 0
    assert found["TRITON_CACHE_DIR"].path.endswith(".triton/cache")


def test_a_shared_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4"),
    ]
    monkeypatch.setattr(caches.psutil, "disk_partitions", lambda all: mounts)
    found = {c.variable: c for c in probe_caches({"AITER_JIT_DIR": str(tmp_path / "jit"), "HOME": "/root"})}
    assert found["AITER_JIT_DIR"].network == "nfs4"
    assert found["VLLM_CACHE_ROOT"].network == ""


@pytest.mark.engine
def test_features_of_the_installed_vllm() -> None:
    found = features(vllm_folder())
    assert found.keys() == PROBES.keys()
    assert found["adaptive_verification"] and found["block_is_width"] and not found["block_guard"]


def test_names_are_read_from_the_sources(tmp_path: Path) -> None:
    """Flags as text and as fields, in a file that has moved between releases."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text('group.add_argument("--max-num-seqs", **kwargs)\n')
    moved = tmp_path / "entrypoints" / "somewhere"
    moved.mkdir(parents=True)
    (moved / "cli_args.py").write_text("class FrontendArgs:\n    chat_template: str | None = None\n")
    (tmp_path / "envs.py").write_text('"VLLM_CACHE_ROOT": lambda: None,\n# VLLM_NOT_QUOTED\n')
    assert flags(tmp_path) == ["chat-template", "max-num-seqs"]
    assert variables(tmp_path) == ["VLLM_CACHE_ROOT"]
    assert (flags(None), variables(None), flags(moved), variables(moved)) == ([], [], [], [])


def test_no_vllm_has_no_features(tmp_path: Path) -> None:
    assert features(None) == {}
    assert set(features(tmp_path).values()) == {False}
