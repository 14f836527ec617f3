"""The phases of a worker's life, what follows the loading of models, and what is reported as never loaded."""

from __future__ import annotations

import types
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_deploy.plugin.amd import modules
from dspark_deploy.plugin.amd.compiles import Compiles, Phase
from dspark_deploy.plugin.amd.runner import limits, loaded_models, runner_patch, worker_patch
from dspark_deploy.plugin.registry import Patch
from dspark_deploy.plugin.settings import Settings


def install(patch: Patch) -> None:
    verdict = patch.examine()
    assert verdict.state is None, verdict.reason
    patch.install()


def runner_module(seen: list[Any], compiles: Compiles) -> Any:
    class GPUModelRunner:
        speculator = None

        def load_model(self) -> None:
            seen.append(("load", compiles.phase, self.speculator))

        def capture_model(self, fails: bool = False) -> None:
            seen.append(("capture", compiles.phase))
            if fails:
                raise ValueError("out of memory")

    module: Any = types.ModuleType("vllm.v1.worker.gpu.model_runner")
    module.GPUModelRunner = GPUModelRunner
    return module


def test_warm_up_follows_the_loading_once_and_capture_is_a_phase() -> None:
    seen: list[Any] = []
    compiles = Compiles()
    module = runner_module(seen, compiles)
    install(runner_patch(module, compiles, lambda runner: seen.append(("warm", compiles.phase))))
    runner = module.GPUModelRunner()
    runner.load_model()
    runner.load_model()  # weights are reloaded after a sleep
    runner.capture_model()
    assert seen == [
        ("load", Phase.LOAD, None),
        ("warm", Phase.WARMUP),
        ("load", Phase.WARMUP, None),
        ("capture", Phase.CAPTURE),
    ]
    with pytest.raises(ValueError, match="out of memory"):
        runner.capture_model(fails=True)
    assert compiles.phase is Phase.WARMUP, "a failed capture is over"


def test_a_runner_of_another_structure_is_refused() -> None:
    module: Any = types.ModuleType("m")
    module.GPUModelRunner = type("GPUModelRunner", (), {"load_model": lambda self: None})
    verdict = runner_patch(module, Compiles(), lambda runner: None).examine()
    assert verdict.state == "refused" and "does not use speculator" in verdict.reason
    module.GPUModelRunner = type("GPUModelRunner", (), {})
    assert "has no load_model" in runner_patch(module, Compiles(), lambda runner: None).examine().reason


def test_readiness_begins_serving_also_where_the_work_is_in_another_method() -> None:
    class Worker:
        def kernel_warmup(self) -> str:
            return "times"

        def compile_or_warm_up_model(self) -> str:
            return self._inner()

        def _inner(self) -> str:
            return self.kernel_warmup()

    module: Any = types.ModuleType("m")
    module.Worker = Worker
    compiles, ready = Compiles(), []
    patch = worker_patch(module, compiles, lambda: ready.append(compiles.phase))
    install(patch)
    assert module.Worker().compile_or_warm_up_model() == "times"
    assert ready == [Phase.LOAD] and compiles.phase is Phase.SERVING


def fake_runner(**changes: Any) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=None),
    )
    return SimpleNamespace(**({"vllm_config": config, "model": "t", "speculator": None} | changes))


def test_models_and_limits_of_a_runner() -> None:
    assert loaded_models(fake_runner()) == {"target": "t"}
    assert loaded_models(fake_runner(speculator=SimpleNamespace(model="d"))) == {"target": "t", "draft": "d"}
    assert limits(fake_runner()) == (64, [])


def test_pipeline_stages_are_skipped_and_say_so() -> None:
    runner = fake_runner()
    runner.vllm_config.parallel_config.pipeline_parallel_size = 2
    assert "2 stages" in modules.warm_runner(runner, Compiles()).skipped


def test_modules_that_were_never_loaded_are_not_applicable(tmp_path: Any) -> None:
    made = modules.makers(Settings("rocm", tmp_path), Compiles(), lambda runner: None, lambda: None)
    names = {modules._never_loaded(name).name for name in made}
    assert {"fused-post:deepseek_v41", "fused-post:deepseek_v4"} <= names and len(names) == len(made)
    assert modules._never_loaded(modules.DRAFTS[0]).examine().state == "not applicable"
