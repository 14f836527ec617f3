"""How twins get into vLLM's modules, when they stay out, and where a launch goes that a twin declines."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
import types

import pytest
from pairs import TWINS, kernel

from dspark_deploy.plugin import process
from dspark_deploy.plugin.cpu_engine.twins import SHORTCUTS, install
from dspark_deploy.plugin.cpu_engine.twins.fingerprint import fingerprint
from dspark_deploy.plugin.cpu_engine.twins.launcher import DECLINED, TwinKernel, rebind
from dspark_deploy.plugin.registry import Registry, State
from dspark_deploy.plugin.settings import Settings


@pytest.mark.parametrize("twin", TWINS.values(), ids=lambda twin: twin.twin)
def test_the_catalogue_fits_this_vllm(twin):
    assert install._examine(twin).state is None
    original = kernel(twin.twin.split(":")[1])
    theirs = inspect.signature(original.fn).parameters
    ours = inspect.signature(install.function(twin)).parameters
    assert list(ours)[1:-1] == list(theirs)
    for name, parameter in theirs.items():
        if parameter.default is not inspect.Parameter.empty:
            assert ours[name].default == parameter.default


def test_a_changed_kernel_keeps_the_interpreter():
    twin = dataclasses.replace(TWINS["post_update"], fingerprint="0" * 16)
    verdict = install._examine(twin)
    assert verdict.state is State.REFUSED
    assert TWINS["post_update"].fingerprint in verdict.reason


def test_changed_parameters_are_named(monkeypatch):
    twin = TWINS["post_update"]
    found = kernel("post_update")
    names = ["total_length" if name == "total_len_ptr" else name for name in found.arg_names]
    monkeypatch.setattr(found, "arg_names", names)
    verdict = install._examine(twin)
    assert verdict.state is State.REFUSED
    assert verdict.reason == "its parameters differ in total_len_ptr, total_length"


@pytest.mark.parametrize(
    "name, reason",
    [
        ("vllm.v1.worker.gpu.input_batch._no_such_kernel", "the module has no such kernel"),
        ("vllm.v1.worker.no_such_module._kernel", "there is no module vllm.v1.worker.no_such_module"),
        ("vllm.v1.worker.gpu.input_batch.InputBatch", "a type stands in its place, not a Triton kernel"),
    ],
)
def test_a_missing_kernel_is_refused(name, reason):
    verdict = install._examine(dataclasses.replace(TWINS["post_update"], kernel=name))
    assert (verdict.state, verdict.reason) == (State.REFUSED, reason)


def test_a_fingerprint_follows_what_the_kernel_calls(monkeypatch):
    """The Gumbel kernel's own lines don't mention the salt, nor the hash; its digest depends on both."""
    from vllm.triton_utils import tl
    from vllm.v1.worker.gpu.sample import gumbel

    original = kernel("gumbel_sample")
    before = fingerprint(original)
    with monkeypatch.context() as patched:
        patched.setattr(gumbel, "_DRAFT_NOISE_SALT", tl.constexpr(1 << 29))
        assert fingerprint(original) != before
    with monkeypatch.context() as patched:
        patched.setattr(gumbel, "_murmur3_mix", gumbel._murmur3_fmix32)
        assert fingerprint(original) != before
    assert fingerprint(original) == before


def test_a_twin_of_a_module_that_is_not_loaded_waits_for_it(monkeypatch):
    """An engine that never loads the module neither pays for it nor reports its twin."""
    found = []
    name = "vllm.v1.attention.backends.mla.compressor_utils"
    twin = TWINS["compressed_slot_mapping"]
    monkeypatch.setattr(install, "CATALOGUE", (twin,))
    monkeypatch.setattr(install, "SHORTCUTS", ())
    original = kernel("compressed_slot_mapping")
    monkeypatch.delitem(sys.modules, name)
    package = importlib.import_module(name.rpartition(".")[0])
    monkeypatch.setattr(package, "compressor_utils", package.compressor_utils)  # to be the old one after
    install.watch(found.extend)
    assert not found and name not in sys.modules
    module = importlib.import_module(name)
    assert [patch.name for patch in found] == ["twin:CompressedSlotMappingKernel"]
    assert found[0].target == twin.kernel and module.CompressedSlotMappingKernel.kernel is not original


WORKERS_OWN = """
import sys
import vllm.v1.worker.cpu.shm
import vllm.v1.worker.cpu.model_runner
from dspark_deploy.plugin.cpu_engine import worker
print(worker._RUNNER in sys.modules)
from dspark_deploy.plugin.cpu_engine.twins import install
print(*filter(install._is_awaited, install._by_module()))
"""


def test_what_is_loaded_for_the_twins_is_what_the_worker_loads_in_any_case():
    """So its time is not the plugin's. The modules of drafts wait for an engine with one."""
    found = subprocess.run([sys.executable, "-c", WORKERS_OWN], capture_output=True, text=True, check=True)
    own, awaited = found.stdout.splitlines()[-2:]
    assert own == "True"
    assert sorted(awaited.split()) == [
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "vllm.v1.worker.gpu.spec_decode.dspark.speculator",
    ]


def test_a_module_that_this_vllm_lacks_is_refused_by_name(monkeypatch):
    twin = dataclasses.replace(
        TWINS["post_update"], kernel="vllm.v1.worker.gone.input_batch._post_update_kernel"
    )
    monkeypatch.setattr(install, "CATALOGUE", (twin,))
    monkeypatch.setattr(install, "SHORTCUTS", ())
    (patch,) = install.loaded()
    assert patch.examine().reason == "there is no module vllm.v1.worker.gone"


def test_every_importer_of_a_kernel_is_rebound(monkeypatch):
    original = kernel("post_update")
    module = types.ModuleType("vllm.an_importer")
    module._post_update_kernel = original
    monkeypatch.setitem(sys.modules, module.__name__, module)
    from vllm.v1.worker.gpu import input_batch

    assert rebind(original, "twin") == 2
    try:
        assert module._post_update_kernel == input_batch._post_update_kernel == "twin"
    finally:
        input_batch._post_update_kernel = original


def test_launches_reach_the_twin_and_declined_ones_the_kernel():
    launches = []

    class Kernel:
        fn, arg_names = kernel("post_update").fn, ["a", "b"]

        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append(("kernel", grid, args, kwargs))

    def twin(grid, a, b, **options):
        launches.append(("twin", grid, (a, b), options))
        return DECLINED if b else None

    launcher = TwinKernel(Kernel(), twin)
    launcher[(3,)](1, b=0, num_warps=1)
    launcher[(3, 2)](1, b=2, num_warps=1)
    assert launches == [
        ("twin", (3,), (1, 0), {"num_warps": 1}),
        ("twin", (3, 2), (1, 2), {"num_warps": 1}),
        ("kernel", (3, 2), (1,), {"b": 2, "num_warps": 1}),
    ]


def asking_worker(monkeypatch, tmp_path, **settings):
    """A worker's process up to vLLM's call, which is left to make; what it patches, save twins, is undone."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.ops import topk_topp_sampler

    path = tmp_path / "settings.json"
    Settings("cpu", tmp_path / "reports", **settings).write(path)
    monkeypatch.setenv("DSPARK_DEPLOY_SETTINGS", str(path))
    registry = Registry()
    monkeypatch.setattr(process, "_registry", registry)
    monkeypatch.setattr(CpuPlatform, "register_triton_kernel_overrides", classmethod(lambda cls: None))
    name = "apply_top_k_top_p_triton"
    monkeypatch.setattr(topk_topp_sampler, name, getattr(topk_topp_sampler, name))
    for shortcut in SHORTCUTS:
        owner, name = install._owner(shortcut.function)
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, original)
        for module in list(sys.modules.values()):
            if module is not owner and getattr(module, "__dict__", {}).get(name) is original:
                monkeypatch.setattr(module, name, original)
    return registry, CpuPlatform


def test_a_worker_that_asks_for_overrides_gets_the_twins(monkeypatch, tmp_path):
    """The whole way: general hook, vLLM's call in the worker, one record for each twin; then undone."""
    registry, platform = asking_worker(monkeypatch, tmp_path)
    originals = {name: kernel(name) for name in TWINS}
    process.run_phase("general")
    assert "worker-phase" in {record.name for record in registry.records}
    try:
        platform.register_triton_kernel_overrides()
        states = {record.name: record.state for record in registry.records if record.name.startswith("twin:")}
        assert len(states) == len(TWINS)
        assert set(states.values()) == {State.APPLIED}
        assert all(isinstance(install._kernel(twin), TwinKernel) for twin in TWINS.values())
        shortcuts = [record for record in registry.records if record.name.startswith("shortcut:")]
        assert [record.state for record in shortcuts] == [State.APPLIED] * len(SHORTCUTS)
        assert all(
            hasattr(getattr(*install._owner(shortcut.function)), "__wrapped__") for shortcut in SHORTCUTS
        )
    finally:
        for name, twin in TWINS.items():
            install.put(twin, originals[name])
    assert all(install._kernel(twin) is originals[name] for name, twin in TWINS.items())


def test_without_twins_every_kernel_stays(monkeypatch, tmp_path):
    registry, platform = asking_worker(monkeypatch, tmp_path, cpu_twins=False)
    process.run_phase("general")
    platform.register_triton_kernel_overrides()
    # DeepSeek-V4's come with their modules, some of which other tests of this process have loaded.
    others = ("numerics-watch", "resolved-watch", "mhc-provider", "cpu-deepseek-v4", "cpu-v4-")
    assert [record.name for record in registry.records if not record.name.startswith(others)] == [
        "vllm-triton-enabled",
        "worker-phase",
        "top-k-top-p",
    ]
    assert all(install._kernel(twin) is kernel(name) for name, twin in TWINS.items())


def test_top_k_and_top_p_are_answered():
    """vLLM's own entry: the kernel fails in the interpreter; patched, it says what vLLM's torch code says."""
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    from dspark_deploy.plugin.cpu_engine import worker

    theirs = sampler.apply_top_k_top_p_triton
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    k, p = torch.tensor([3, 40, 8], dtype=torch.int32), torch.tensor([1.0, 0.5, 0.9])
    try:
        assert worker._examine_top_k_top_p().state is None
        worker._install_top_k_top_p()
        answered = sampler.apply_top_k_top_p(logits.clone(), k, p)
    finally:
        sampler.apply_top_k_top_p_triton = theirs
    expected = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, p)
    assert torch.equal(answered, expected)
    assert answered[0].isfinite().sum() == 3
    with pytest.raises(Exception, match="has no attribute 'to'"):
        sampler.apply_top_k_top_p(logits.clone(), k, p)
