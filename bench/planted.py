"""A second vLLM plugin, which plants the upstream fault in every vLLM process of an engine.

    with planted("both", folder):          # `nowhere`, `both`, `target` or `draft`
        ...                                # whatever starts vLLM here gets it

`folder` becomes an installed distribution on PYTHONPATH, whose entry point vLLM finds as it finds any
plugin's: `dspark-serve` needs no switch for it, and has none. On a CPU vLLM applies the norm behind mHC by
itself, where the factor would vanish. So the CPU's layer is made as a GPU's is, with the norm folded into
`MHCPreOp`, and the factor behind it: in front of attention and in front of the experts, the two places of
each layer where the faulty kernel stood. Folded with a factor of 1 it is the healthy engine.

Not covered: the head's own reduction; GPUs, where the real kernel is what to replace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "dspark_deploy" / "tiny" / "weights" / "tiny-v4"
MODEL = "vllm.models.deepseek_v4.cpu.model"
WHERE_ENV = "PLANTED_FAULT"
PLACES = ("nowhere", "both", "target", "draft")
FACTOR = 2**0.5


@contextmanager
def planted(where: str, folder: Path) -> Iterator[None]:
    """Inside, vLLM processes started from here hold the fault `where` it is to be. `folder` is scratch."""
    facts = folder / "planted_fault-1.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-fault\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted_fault = bench.planted:hook\n")
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    names = {"PYTHONPATH": path, WHERE_ENV: where}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def hook() -> None:
    """What vLLM's plugin loader calls. The layer's module brings the operators' with it, patched by then."""
    from dspark_deploy.plugin.when_loaded import when_loaded

    when_loaded(MODEL, _plant)


def _plant(module: ModuleType | Any) -> None:
    """Fold the norms of the CPU's layers into `MHCPreOp`, with the factor where it is to be."""
    from vllm.model_executor.layers import mhc
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.utils import extract_layer_index

    class Folded(RMSNorm):
        """Holds the norm's weight; the operator before it has applied it."""

        def forward(self, x: Any) -> Any:
            return x

    layer = module.DeepseekV4DecoderLayer
    construct = layer.__init__
    target_layers = json.loads((CHECKPOINT / "config.json").read_text())["num_hidden_layers"]
    where = os.environ[WHERE_ENV]

    def __init__(self: Any, vllm_config: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        construct(self, vllm_config, prefix, *args, **kwargs)
        part = "draft" if extract_layer_index(prefix) >= target_layers else "target"
        self.fuse_mhc_rmsnorm = True
        self.mhc_pre.factor = self.mhc_fused_post_pre.factor = FACTOR if where in ("both", part) else 1.0
        for norm in (self.attn_norm, self.ffn_norm):
            norm.__class__ = Folded

    def hc_pre(self: Any, x: Any, hc_fn: Any, hc_scale: Any, hc_base: Any) -> tuple[Any, Any, Any]:
        norm = self.attn_norm if hc_fn is self.hc_attn_fn else self.ffn_norm
        post, comb, layer_input = self.mhc_pre(
            residual=x,
            fn=hc_fn,
            hc_scale=hc_scale,
            hc_base=hc_base,
            rms_eps=self.rms_norm_eps,
            hc_pre_eps=self.hc_eps,
            hc_sinkhorn_eps=self.hc_eps,
            hc_post_mult_value=self.hc_post_alpha,
            sinkhorn_repeat=self.hc_sinkhorn_iters,
            norm_weight=norm.weight,
            norm_eps=self.rms_norm_eps,
        )
        return layer_input, post, comb

    layer.__init__, layer.hc_pre = __init__, hc_pre
    for operator in (mhc.MHCPreOp, mhc.MHCFusedPostPreOp):
        operator.forward_cpu = _with_norm(operator.forward_native)


def _with_norm(native: Any) -> Any:
    """vLLM's torch operator, whose last output is the layer input, with norm and factor folded in."""

    def forward(self: Any, *args: Any, norm_weight: Any = None, norm_eps: float = 0.0, **named: Any) -> Any:
        import torch

        *mixes, layer_input = native(self, *args, **named)
        if norm_weight is not None:
            wide = layer_input.float()
            normed = torch.nn.functional.rms_norm(wide, wide.shape[-1:], norm_weight.float(), norm_eps)
            layer_input = (normed * self.factor).to(layer_input.dtype)
        return *mixes, layer_input

    return forward
