"""mHC pre as two launches in the place of vLLM's TileLang kernel, by the same arguments.

`TwoLaunches` stands under the kernel's name: called as vLLM calls it, or asked to compile for its parameters,
it does so with `mix` and `collapse` of `dspark_deploy.kernels`. A kernel can be replaced only if `unmatched`
finds nothing: each of its parameters is known by name, and none that is read is missing.

Not covered: hc_mult other than 4, and hidden sizes that are no multiple of 256, for which a launch raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# What a replacement reads of a call by name, so every one must be a parameter of the kernel.
TENSORS = (
    *("gemm_out_mul", "gemm_out_sqrsum", "hc_scale", "hc_base", "residual"),
    *("post_mix", "comb_mix", "layer_input"),
)
NUMBERS = (
    *("hidden_size", "rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "hc_post_mult_value"),
    *("sinkhorn_repeat", "n_splits", "hc_mult"),
)
NORM = ("norm_weight", "norm_eps")
OPTIONS = ("gemm_last_dim", "use_pre_mix_in", "save_pre_mix", "rms_numel", "split_mode", "write_aux")
OPTIONAL_TENSORS = ("pre_mix_in", "pre_mix_out", "aux_out", "residual_out")


def unmatched(function: Callable[..., Any]) -> str:
    """How a kernel's arguments differ from a replacement's: what is missing and unknown; empty if nothing."""
    parameters = inspect.signature(function).parameters
    norm = NORM if any(name in parameters for name in NORM) else ()
    needed = (*TENSORS, *NUMBERS, *norm)
    missing = [name for name in needed if name not in parameters]
    unknown = [name for name in parameters if name not in {*needed, *OPTIONS, *OPTIONAL_TENSORS}]
    return f"missing {missing}, unknown {unknown}" if missing or unknown else ""


class TwoLaunches:
    """Stands where vLLM's kernel stood: called with its arguments, or asked to compile for its parameters."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self._signature = inspect.signature(function)

    def compile(self, **parameters: Any) -> TwoLaunches:
        """Compile what a call with these compile-time parameters will launch."""
        from dspark_deploy.kernels import mhc_pre

        call = _Call(self._defaults() | parameters)
        if call.mixes:
            mhc_pre.mix_kernel(int(call["n_splits"]), call.rms_numel, call.constants)
        if call.collapses:
            mhc_pre.collapse_kernel(
                int(call["hidden_size"]),
                call.get("norm_eps"),
                mhc_pre.plan(int(call["hidden_size"]), with_norm=call.get("norm_eps") is not None),
                stream_zero=call.stream_zero,
                write_aux=bool(call.get("write_aux")),
            )
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """Launch. Tensors and options as vLLM's kernel takes them; outputs are written."""
        bound = self._signature.bind(*arguments, **options)
        bound.apply_defaults()
        _Call(bound.arguments).launch()

    def _defaults(self) -> dict[str, Any]:
        return {
            name: parameter.default
            for name, parameter in self._signature.parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }


class _Call(dict[str, Any]):
    """One call's arguments by name."""

    @property
    def broadcast(self) -> bool:
        """Whether the residual is one stream, to be copied to all."""
        return "residual_out" in self

    @property
    def mixes(self) -> bool:
        return self.get("split_mode", "fused") != "input"

    @property
    def collapses(self) -> bool:
        return self.get("split_mode", "fused") != "stats"

    @property
    def stream_zero(self) -> bool:
        """With a pre-mix that is saved for the next sublayer, and none carried here."""
        return bool(self.get("save_pre_mix")) and not self.get("use_pre_mix_in")

    @property
    def rms_numel(self) -> int:
        streams = 1 if self.broadcast else int(self["hc_mult"])
        return int(self.get("rms_numel") or streams * int(self["hidden_size"]))

    @property
    def constants(self) -> Any:
        from dspark_deploy.kernels.mhc_pre import Constants

        return Constants(
            rms_eps=self["rms_eps"],
            pre_eps=self["hc_pre_eps"],
            sinkhorn_eps=self["hc_sinkhorn_eps"],
            post_mult=self["hc_post_mult_value"],
            sinkhorn_repeat=self["sinkhorn_repeat"],
            norm_eps=self.get("norm_eps", 0.0),
        )

    def launch(self) -> None:
        from dspark_deploy.kernels import mhc_pre

        residual, mul = self["residual"], self["gemm_out_mul"]
        coefficients = int(self["hc_mult"]) * (int(self["hc_mult"]) + 2)
        if self.broadcast:
            self["residual_out"].copy_(residual[:, None].expand_as(self["residual_out"]))
            residual = self["residual_out"]
        post = self["post_mix"]
        pre = self["pre_mix_out"] if self.get("save_pre_mix") else post.new_empty(post.shape)
        if self.mixes:
            mhc_pre.mix(
                mul[..., :coefficients].contiguous(),
                self["gemm_out_sqrsum"],
                self["hc_scale"],
                self["hc_base"],
                self.constants,
                self.rms_numel,
                mhc_pre.Mixed(pre, post, self["comb_mix"]),
            )
        if self.collapses:
            carried = self["pre_mix_in"] if self.get("use_pre_mix_in") else pre
            mhc_pre.collapse(
                None if self.stream_zero else carried,
                residual,
                self.get("norm_weight"),
                self.constants.norm_eps,
                out=self["layer_input"],
                aux=self["aux_out"] if self.get("write_aux") else None,
            )
