"""What vLLM made of its flags, as a worker has it: the section `resolved` of this process's report.

vLLM changes settings that a platform, a model or another setting does not allow, and mostly says so in one
line of a long log. A worker's own copy of the configuration is read when its KV cache is there: by then the
graph mode has been settled too. `Worker.initialize_from_config` is what CUDA, ROCm and CPU workers share for
that.

Not covered: what is chosen by layers, such as the backend of each attention layer, and what the scheduler's
process changes of its own after the workers have started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.gate import WORKER, AddSection, ApplyLate, local_workers
from dspark_deploy.plugin.registry import READY, Patch, Verdict, refused
from dspark_deploy.plugin.when_loaded import when_loaded

SECTION = "resolved"
# vLLM's flag -> where VllmConfig holds what became of it. A release that has no such field leaves it out.
FLAGS = {
    "dtype": "model_config.dtype",
    "max-model-len": "model_config.max_model_len",
    "enforce-eager": "model_config.enforce_eager",
    "quantization": "model_config.quantization",
    "max-num-seqs": "scheduler_config.max_num_seqs",
    "max-num-batched-tokens": "scheduler_config.max_num_batched_tokens",
    "enable-chunked-prefill": "scheduler_config.enable_chunked_prefill",
    "async-scheduling": "scheduler_config.async_scheduling",
    "kv-cache-dtype": "cache_config.cache_dtype",
    "block-size": "cache_config.block_size",
    "enable-prefix-caching": "cache_config.enable_prefix_caching",
    "gpu-memory-utilization": "cache_config.gpu_memory_utilization",
    "tensor-parallel-size": "parallel_config.tensor_parallel_size",
    "pipeline-parallel-size": "parallel_config.pipeline_parallel_size",
    "data-parallel-size": "parallel_config.data_parallel_size",
    "enable-expert-parallel": "parallel_config.enable_expert_parallel",
    "attention-backend": "attention_config.backend",
    "moe-backend": "kernel_config.moe_backend",
    "cudagraph-capture-sizes": "compilation_config.cudagraph_capture_sizes",
    "max-cudagraph-capture-size": "compilation_config.max_cudagraph_capture_size",
    "compilation-config.mode": "compilation_config.mode",
    "compilation-config.cudagraph_mode": "compilation_config.cudagraph_mode",
}
SPECULATIVE = (
    "method",
    "model",
    "num_speculative_tokens",
    "draft_sample_method",
    "rejection_sample_method",
    "dspark_draft_topk",
    "num_speculative_tokens_per_batch_size",
    "enable_adaptive_verification",
)


def hook(apply_late: ApplyLate, add_section: AddSection, write: Callable[[], None]) -> Patch:
    """The patch of the general phase: it comes with the worker's module, which only workers load."""

    def install() -> str:
        when_loaded(WORKER, lambda module: apply_late([patch(module, add_section, write)]))
        return "a worker will say what vLLM made of its flags"

    return Patch(
        "resolved-watch", "sys.meta_path", "reading back reaches workers only", lambda: READY, install
    )


def patch(module: ModuleType, add_section: AddSection, write: Callable[[], None]) -> Patch:
    """The patch of `vllm.v1.worker.gpu_worker`."""
    return Patch(
        "resolved-config",
        f"{WORKER}.Worker.initialize_from_config",
        "what was asked for is compared with what vLLM made of it",
        functools.partial(_examine, module),
        functools.partial(_install, module, add_section, write),
    )


def _examine(module: ModuleType) -> Verdict:
    if not callable(getattr(getattr(module, "Worker", None), "initialize_from_config", None)):
        return refused(
            f"{WORKER} has no Worker.initialize_from_config, after which a configuration is settled"
        )
    return READY


def _install(module: Any, add_section: AddSection, write: Callable[[], None]) -> str:
    original = module.Worker.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        document = resolved(self.vllm_config)
        add_section(SECTION, lambda: document)
        write()
        return result

    module.Worker.initialize_from_config = initialize_from_config
    return "initialize_from_config is followed by a report of the configuration"


def resolved(config: Any) -> dict[str, Any]:
    """The configuration as plain JSON values: model, flags by vLLM's names, and what drafts, or None."""
    speculative = getattr(config, "speculative_config", None)
    return {
        "workers": local_workers(config.parallel_config),
        "model": str(config.model_config.model),
        "flags": dict(_flags(config)),
        "speculative": None
        if speculative is None
        else {name: _plain(getattr(speculative, name)) for name in SPECULATIVE if hasattr(speculative, name)},
    }


def _flags(config: Any) -> Iterator[tuple[str, Any]]:
    for flag, path in FLAGS.items():
        section, _, name = path.partition(".")
        holder = getattr(config, section, None)
        if hasattr(holder, name):
            yield flag, _plain(getattr(holder, name))


def _plain(value: Any) -> Any:
    """The value as JSON has it; an enum by its number or name, a torch dtype without `torch.`."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value).removeprefix("torch.")
