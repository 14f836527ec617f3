"""A SIMULATED AMD GPU: vLLM's ROCm code paths on a CPU, one architecture and one vLLM version per process.

    with `start(version, arch, providers)` as the first thing a process does, before anything of vLLM

What is real: vLLM's modules, its ROCm platform class, the target and draft classes, their mHC operators, the
dispatch code, TileLang's parsing of calls into keys and, where asked, TileLang's lowering to HIP source.
What is simulated: the GPU behind `amdsmi`; AITER, whose operators return outputs of the right shape and
compute nothing; attention and experts, which pass their input on; the HIP compiler, which returns a fixed
string of bytes. Nothing here ever ran on an AMD GPU, and no result from here is a measurement of one.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import types
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INSTALLED = "0.32.0"
ARCHITECTURES = ("gfx950", "gfx942")
FAMILIES = ("deepseek_v4", "deepseek_v41")


def environment(version: str, arch: str, folder: Path) -> dict[str, str]:
    """The environment of a child process: source folders, TileLang's target, and caches in `folder`."""
    from tests.support.sources import tilelang_site, vllm_sources

    root = Path(__file__).parents[2]
    paths = [tilelang_site(), root, *([] if version == INSTALLED else [vllm_sources(version)])]
    return (
        os.environ
        | caches(folder)
        | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TILELANG_DEFAULT_TARGET": f'{{"kind":"hip","mcpu":"{arch}","thread_warp_size":64}}',
            "TRITON_INTERPRET": "1",
            "HIP_VISIBLE_DEVICES": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
    )


def caches(folder: Path) -> dict[str, str]:
    """The environment that keeps the compilers' caches in `folder`."""
    return {"TILELANG_CACHE_DIR": str(folder / "tilelang"), "TRITON_CACHE_DIR": str(folder / "triton")}


def start(arch: str, aiter: bool) -> None:
    """Make this process vLLM's ROCm build on `arch`. Must precede every import of vLLM."""
    assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules), "too late"
    sys.modules["amdsmi"] = _amdsmi(arch)
    for extension in ("_C", "_C_stable_libtorch", "_rocm_C"):
        # The CPU wheel's is built for instructions that this CPU may not have; nothing here calls into one.
        sys.modules[f"vllm.{extension}"] = None  # type: ignore[assignment]
    import vllm.platforms
    from vllm.platforms.rocm import RocmPlatform

    # The CPU wheel's version says "cpu", by which vLLM would switch Triton off.
    vllm.platforms.vllm_version_matches_substr = lambda _text: False
    RocmPlatform.device_type = "cpu"
    vllm.platforms._current_platform = RocmPlatform()
    _operators_without_gpu()
    if aiter:
        _aiter_present()


def _amdsmi(arch: str) -> types.ModuleType:
    module: Any = types.ModuleType("amdsmi")
    module.AmdSmiException = type("AmdSmiException", (Exception,), {})
    module.AmdSmiMemoryType = SimpleNamespace(VRAM=0)
    module.amdsmi_init = module.amdsmi_shut_down = lambda *_a, **_k: None
    module.amdsmi_get_processor_handles = lambda *_a, **_k: [0]
    module.amdsmi_get_gpu_asic_info = lambda _handle: {
        "target_graphics_version": arch,
        "market_name": "SIMULATED",
        "device_id": "0x75a3",
        "asic_serial": "0x0",
    }
    module.amdsmi_get_gpu_device_uuid = lambda _handle: "0"
    module.amdsmi_get_gpu_memory_total = lambda _handle, _kind: 288 << 30
    module.amdsmi_topo_get_link_type = lambda *_a: {"hops": 1, "type": 2}
    module.amdsmi_topo_get_numa_node_number = lambda *_a: 0
    return module


def _operators_without_gpu() -> None:
    """Let vLLM's custom operators run for CPU and for meta tensors.

    TileLang's run their real Python, which asks for kernels. AITER's run their shape function, since there
    is no AITER. Triton's run for CPU tensors in Triton's interpreter.
    """
    import vllm.utils.torch_utils as torch_utils

    register = torch_utils.direct_register_custom_op

    def simulated(op_name: str, op_func: Any, mutates_args: Any = None, fake_impl: Any = None, **rest: Any):
        rest.pop("dispatch_key", None)
        everywhere = "CompositeExplicitAutograd"
        if op_name.endswith("_aiter"):
            return register(
                op_name, _typed_as(fake_impl, op_func), mutates_args, dispatch_key=everywhere, **rest
            )
        if op_name.endswith("_tilelang"):
            return register(op_name, op_func, mutates_args, dispatch_key=everywhere, **rest)
        if op_name == "hc_head_triton":  # writes into its argument, and has no shape function
            return register(
                op_name,
                _typed_as(lambda *_a, **_k: None, op_func),
                mutates_args,
                dispatch_key=everywhere,
                **rest,
            )
        return register(op_name, op_func, mutates_args, fake_impl, dispatch_key="CPU", **rest)

    torch_utils.direct_register_custom_op = simulated


def _typed_as(function: Any, original: Any) -> Any:
    """`function` under the signature of `original`, from which torch derives the operator's schema."""
    import functools

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _aiter_present() -> None:
    """Answer vLLM's questions about AITER as a current AITER would; its operators are simulated above."""
    import vllm._aiter_ops as aiter_ops

    if (
        find_spec("vllm.kernels.aiter_ops") is not None
    ):  # looks for AITER's other operators, and must find none
        importlib.import_module("vllm.kernels.aiter_ops")
    aiter_ops.is_aiter_found_and_supported = lambda: True
    aiter_ops.rocm_aiter_ops.mhc_fused_post_pre_delayed_prefers_unfused = staticmethod(lambda n: n >= 1024)
    package: Any = types.ModuleType("aiter")
    package.__path__ = []
    ops: Any = types.ModuleType("aiter.ops")
    ops.__path__ = []
    mhc: Any = types.ModuleType("aiter.ops.mhc")

    def takes_norm(residual: Any, norm_weight: Any = None, norm_eps: float = 0.0) -> None:
        raise AssertionError("a simulated AITER kernel must not be called")

    mhc.mhc_pre = mhc.mhc_fused_post_pre = takes_norm
    ops.mhc = mhc
    sys.modules |= {"aiter": package, "aiter.ops": ops, "aiter.ops.mhc": mhc}


def stub_device_compiler() -> list[str]:
    """Put a stub in place of hipcc. Returns the HIP sources that it was given, in order, as they come."""
    import tilelang  # noqa: F401  # registers its own compiler when it is imported; ours must come after
    import tvm_ffi

    sources: list[str] = []

    @tvm_ffi.register_global_func("tilelang_callback_hip_compile", override=True)
    def compile_nothing(code: str, _target: Any) -> bytearray:
        sources.append(str(code))
        return bytearray(b"\x7fELF-SIMULATED")

    return sources


def has_family(family: str) -> bool:
    """Whether this vLLM has AMD classes of the family. Imports none of them."""
    package = find_spec("vllm.models")
    folders = list(package.submodule_search_locations or []) if package is not None else []
    return any((Path(folder) / family / "amd" / "dspark.py").is_file() for folder in folders)


class Models:
    """The real target (two layers) and draft (two layers) of one family, with pass-through attention."""

    def __init__(self, family: str, hidden: int, device: str, max_tokens: int = 8192) -> None:
        import torch
        from torch import nn
        from vllm.config import VllmConfig, set_current_vllm_config

        self.family, self.hidden = family, hidden
        base = f"vllm.models.{family}.amd"
        self.vllm_config = VllmConfig()
        with set_current_vllm_config(self.vllm_config):
            _distributed()
            model = importlib.import_module(base + ".model")
            draft = importlib.import_module(base + ".dspark")
            torch.cuda.Stream = type("Stream", (), {"__init__": lambda *_a, **_k: None})

            class Attention(nn.Module):
                def __init__(self, *_a: Any, **_k: Any) -> None:
                    super().__init__()

                def forward(self, _positions: Any, x: Any, *_rest: Any) -> Any:
                    return x

            class Experts(nn.Module):
                def __init__(self, *_a: Any, **_k: Any) -> None:
                    super().__init__()

                def forward(self, x: Any, *_rest: Any) -> Any:
                    return x

            for name in ("DeepseekV4ROCMAiterMLAAttention", "DeepseekV4Attention"):
                if hasattr(model, name):
                    setattr(model, name, Attention)
            if hasattr(model, "_select_dsv4_attn_cls"):
                model._select_dsv4_attn_cls = lambda _config: Attention
            model.DeepseekV4MoE = Experts
            if device == "meta":  # torch decomposes the norm for meta tensors, at several times all else
                model.RMSNorm.forward = lambda _self, x, *_rest: x
            config = _config(self.vllm_config, hf_config(hidden), max_tokens)
            draft.get_current_vllm_config = lambda: config
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                with torch.device(device):
                    self.target = model.DeepseekV4Model(vllm_config=config, prefix="model")
                    self.draft = draft.DSparkDeepseekV4Model(vllm_config=config, prefix="model")
            finally:
                torch.set_default_dtype(before)
            for parameter in (*self.target.parameters(), *self.draft.parameters()):
                if parameter.device.type != "meta":
                    torch.nn.init.normal_(parameter, std=0.02)
            if hasattr(self.target, "finalize_mhc_broadcast_weights"):
                self.target.finalize_mhc_broadcast_weights()
        self.target.aux_hidden_state_layers = (1, 2)
        self.draft_module = draft

    def run(self, tokens: int, name: str = "") -> None:
        """One forward of the target or of the draft; of both without a name."""
        import torch

        device = next(self.draft.parameters()).device
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        embeds = torch.zeros(tokens, self.hidden, dtype=torch.bfloat16, device=device)
        with torch.inference_mode():
            if name != "draft":
                self.target(ids, ids, None, embeds)
            if name != "target":
                self.draft(ids, ids, embeds)


def hf_config(hidden: int) -> SimpleNamespace:
    """A configuration with the two checkpoints' mHC values: 4 streams, 20 Sinkhorn iterations."""
    return SimpleNamespace(
        hidden_size=hidden,
        rms_norm_eps=1e-6,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        num_hidden_layers=2,
        dspark_target_layer_ids=[0, 1],
        n_mtp_layers=2,
        vocab_size=512,
        index_topk=64,
        dspark_markov_rank=8,
        draft_vocab_size=None,
        kv_source_layer_ids=[1],
        sliding_window=128,
        num_hash_layers=0,
        n_routed_experts=8,
        num_experts_per_tok=2,
        architectures=["x"],
        qk_rope_head_dim=64,
        head_dim=128,
        index_head_dim=128,
        index_n_heads=4,
        q_lora_rank=64,
        o_lora_rank=64,
        o_groups=1,
        num_attention_heads=4,
        compress_ratios=[1] * 6,
        num_key_value_heads=1,
        moe_intermediate_size=64,
        n_shared_experts=1,
        rope_theta=1e4,
        max_position_embeddings=4096,
    )


def _config(real: Any, hf: SimpleNamespace, max_tokens: int) -> Any:
    import torch

    class Config:
        """vLLM's configuration with the parts that would need a checkpoint filled in."""

        model_config = SimpleNamespace(hf_config=hf, dtype=torch.bfloat16)
        speculative_config = SimpleNamespace(
            draft_model_config=SimpleNamespace(hf_config=hf),
            use_eagle=lambda: False,
            uses_draft_model=lambda: False,
            method="dspark",
            num_speculative_tokens=5,
        )
        quant_config = None

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real.scheduler_config.max_num_batched_tokens = max_tokens
    return Config()


def _distributed() -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    file = Path(tempfile.mkdtemp()) / "store"
    init_distributed_environment(1, 0, f"file://{file}", 0, backend="gloo")
    initialize_model_parallel(1, 1)
