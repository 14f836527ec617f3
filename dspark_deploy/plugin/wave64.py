"""vLLM 0.26 to 0.30's mHC pre kernels with a norm, which are wrong on ROCm: ours take their place.

Those kernels hand threads 0..31 of a block one job and threads 32..95 another, and reduce the norm over the
latter. TileLang's HIP reduction shuffles within wavefronts and ignores that the group starts at thread 32:
half of the sum is lost, and each layer's input comes out 1.414 times too large. vLLM 0.31 moved the group to
thread 0.

The fault is found in the kernel's own text: a branch on the thread's number below 32, with a reduction on its
other side. Whatever calls the kernel finds, under the same name, an object that launches `mix` and `collapse`
of `dspark_deploy.kernels`. The numerics gate checks it as it checks every operator; with `mhc.gate: refuse`
an engine whose replacement is wrong as well doesn't start. Emulated only: docs/wave64.md.

Not covered: gfx942, where vLLM doesn't use TileLang for mHC; CUDA, where the kernels are right and stay.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, not_applicable, refused, upstream

KERNELS = "vllm.model_executor.kernels.mhc.tilelang_kernels"
WITH_NORM = "mhc_pre_big_fuse_with_norm_tilelang"
BROADCAST = "mhc_pre_big_fuse_broadcast_with_norm_tilelang"
REPLACED = (WITH_NORM, BROADCAST)
# What a replacement reads of a call by name, so every one must be a parameter of the kernel.
TENSORS = (
    *("gemm_out_mul", "gemm_out_sqrsum", "hc_scale", "hc_base", "residual"),
    *("post_mix", "comb_mix", "layer_input", "norm_weight"),
)
NUMBERS = (
    *("hidden_size", "rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "hc_post_mult_value"),
    *("sinkhorn_repeat", "norm_eps", "n_splits", "hc_mult"),
)
OPTIONS = ("gemm_last_dim", "use_pre_mix_in", "save_pre_mix", "rms_numel", "split_mode", "write_aux")
OPTIONAL_TENSORS = ("pre_mix_in", "pre_mix_out", "aux_out", "residual_out")
REDUCTION = re.compile(r"AllReduce<[^<>]*?,\s*(\d+),\s*\d+,\s*(\d+)")


def patch(module: ModuleType) -> Patch:
    """The patch of vLLM's TileLang mHC kernels, once their module is loaded on ROCm."""
    return Patch(
        "mhc-wave64",
        f"{KERNELS}.{WITH_NORM}",
        "mHC pre with a norm isn't 1.414 times too large on AMD (emulated only)",
        functools.partial(_examine, module),
        functools.partial(_install, module),
        required=True,
    )


def splits_below_a_wave(source: str) -> bool:
    """Whether a kernel's text reduces over threads that start at 32: a branch on `thread < 32` and, on its
    other side, a `reduce_sum`."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(node, ast.If) or not _is_below_32(node.test):
            continue
        calls = [each for part in node.orelse for each in ast.walk(part) if isinstance(each, ast.Call)]
        if any(isinstance(call.func, ast.Attribute) and call.func.attr == "reduce_sum" for call in calls):
            return True
    return False


def _is_below_32(test: ast.expr) -> bool:
    return any(
        isinstance(each, ast.Compare)
        and isinstance(each.left, ast.Call)
        and isinstance(each.left.func, ast.Attribute)
        and each.left.func.attr == "get_thread_binding"
        and isinstance(each.ops[0], ast.Lt)
        and isinstance(each.comparators[0], ast.Constant)
        and each.comparators[0].value == 32
        for each in ast.walk(test)
    )


def misaligned_reductions(generated: str) -> list[str]:
    """Reductions of a generated HIP source whose group doesn't start at a multiple of its own size."""
    return [
        match.group() for match in REDUCTION.finditer(generated) if int(match.group(2)) % int(match.group(1))
    ]


def python_function(kernel: Any) -> Callable[..., Any] | None:
    """The Python function behind a kernel object, which holds it one or two objects deep.

    vLLM defers TileLang's decoration on ROCm (`_kernel_function`), or wraps it in a closure (`__wrapped__`);
    TileLang's own objects hold it as `func.orig_func`.
    """
    if inspect.isfunction(kernel) and not hasattr(kernel, "__wrapped__"):
        return kernel
    for name in ("_kernel_function", "__wrapped__", "orig_func", "func"):
        inner = getattr(kernel, "__dict__", {}).get(name)
        if inner is not None:
            return python_function(inner)
    return None


def _examine(module: ModuleType) -> Verdict:
    found = {name: python_function(getattr(module, name, None)) for name in REPLACED}
    function = found[WITH_NORM]
    if not hasattr(module, WITH_NORM):
        return not_applicable(f"this vLLM has no {WITH_NORM}")
    if function is None:
        return refused(f"{WITH_NORM} is no kernel whose text can be read, so whether it is right isn't known")
    try:
        source = inspect.getsource(function)
    except OSError as error:
        return refused(f"the text of {WITH_NORM} can't be read: {error}")
    if not splits_below_a_wave(source):
        return upstream("its norm reduces over threads that start at a wavefront")
    parameters = inspect.signature(function).parameters
    missing = [name for name in (*TENSORS, *NUMBERS) if name not in parameters]
    known = {*TENSORS, *NUMBERS, *OPTIONS, *OPTIONAL_TENSORS}
    unknown = [name for name in parameters if name not in known]
    if missing or unknown:
        return refused(
            f"{WITH_NORM} is wrong on this wavefront, and takes other arguments than its replacement: "
            f"missing {missing}, unknown {unknown}; set mhc.provider to aiter or torch"
        )
    return READY


def _install(module: Any) -> str:
    replaced = []
    for name in REPLACED:
        function = python_function(getattr(module, name, None))
        if function is not None and splits_below_a_wave(inspect.getsource(function)):
            setattr(module, name, TwoLaunches(name, function))
            replaced.append(name)
    return f"replaced by two launches: {', '.join(replaced)}; emulated only, never run on an AMD GPU"


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
                call.constants.norm_eps,
                mhc_pre.plan(int(call["hidden_size"]), with_norm=True),
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
            norm_eps=self["norm_eps"],
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
                self["norm_weight"],
                self["norm_eps"],
                out=self["layer_input"],
                aux=self["aux_out"] if self.get("write_aux") else None,
            )
