"""Runs a loaded model's own forward without attention and experts: its mHC operators, and little else.

Every mHC operator of a model is called by its decoder layers and by its tail, in ways that differ between
models, between target and draft, and between a first layer and the next. Instead of restating those ways,
the model's own `forward` is run, on a copy of the model that shares every weight and operator, in which

    layer.attn, layer.ffn    return their input
    layer.engram             returns its input, and takes part as when it has hashes
    layer.mono               is absent: a layer that runs as one kernel calls no mHC operator

so that the operators get the shapes, types and options that they get while serving, at any token count, with
neither a KV cache nor metadata. The loaded model itself is left as it was.

Not covered: pipeline stages other than the only one; mono decode layers.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

LAYERS = "vllm.model_executor.layers.mhc"


class StructureError(RuntimeError):
    """A model differs from what a pass through its layers needs; the message says how."""


def mhc_operators(module: Any) -> dict[str, Any]:
    """The mHC operators below `module`, by their path: instances of the classes in vLLM's `layers.mhc`."""
    return {name: child for name, child in module.named_modules() if type(child).__module__ == LAYERS}


def mhc_models(root: Any) -> Iterator[Any]:
    """The modules below `root` that own a list of decoder layers with mHC operators in them."""
    for module in root.modules():
        layers = getattr(module, "layers", None)
        if layers is not None and hasattr(type(layers), "__iter__") and any(map(_is_decoder_layer, layers)):
            yield module


def _is_decoder_layer(layer: Any) -> bool:
    return any(type(child).__module__ == LAYERS for child in layer.children())


class LayerPass:
    """The pass through one loaded model, target or draft.

    `hidden` is the model's hidden size, `streams` its number of mHC streams. Raises StructureError.
    """

    def __init__(self, model: Any) -> None:
        self.name = type(model).__name__
        self.operators = mhc_operators(model)
        layer = next(each for each in model.layers if _is_decoder_layer(each))
        parameters = inspect.signature(type(model).forward).parameters
        for name in ("input_ids", "positions", "inputs_embeds"):
            if name not in parameters:
                raise StructureError(f"{self.name}.forward has no parameter {name}")
        self.hidden, self.streams = int(layer.hidden_size), int(layer.hc_mult)
        self._device = next(model.parameters()).device
        self._staged = "intermediate_tensors" in parameters
        self._model = _without_layers(model)

    def run(self, tokens: int) -> None:
        """One forward over `tokens` zero embeddings, [tokens, hidden] bf16, on the model's device."""
        import torch

        ids = torch.zeros(tokens, dtype=torch.int64, device=self._device)
        embeds = torch.zeros(tokens, self.hidden, dtype=torch.bfloat16, device=self._device)
        arguments: dict[str, Any] = {"input_ids": ids, "positions": ids, "inputs_embeds": embeds}
        if self._staged:
            arguments["intermediate_tensors"] = None
        with torch.inference_mode():
            # The class's own forward: a call of the model could begin a torch.compile of it.
            type(self._model).forward(self._model, **arguments)


def _shallow(module: Any) -> Any:
    """A module of the same class that shares weights and children, with a table of children of its own."""
    twin = copy.copy(module)
    for table in ("_modules", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        twin.__dict__[table] = copy.copy(module.__dict__[table])
    return twin


def _without_layers(model: Any) -> Any:
    from torch import nn

    twin = _shallow(model)
    if getattr(twin, "decoder_replay_layers", None) is not None:
        # The last layers replay on fewer tokens through the loaded model itself; here they run as all do.
        twin.decoder_replay_layers, twin.decoder_replay_start = None, twin.end_layer
    twin._modules["layers"] = nn.ModuleList(
        _pass_through(layer) if _is_decoder_layer(layer) else layer for layer in model.layers
    )
    return twin


@functools.cache
def _echo_class() -> Any:
    from torch import nn

    class Echo(nn.Module):
        """Returns its first floating-point argument, as attention and experts keep shape and type."""

        layer_hash_index = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return next(v for v in (*args, *kwargs.values()) if hasattr(v, "dtype") and v.is_floating_point())

    return Echo


def _pass_through(layer: Any) -> Any:
    twin = _shallow(layer)
    for name in ("attn", "ffn"):
        if name not in twin._modules:
            raise StructureError(
                f"{type(layer).__name__} has no child {name}; its children are {', '.join(twin._modules)}"
            )
        twin._modules[name] = _echo_class()()
    twin.__dict__.pop("mono", None)
    twin._modules.pop("mono", None)
    if hasattr(layer, "mono"):
        twin.__dict__["mono"] = None
    if getattr(layer, "engram", None) is not None:
        twin._modules["engram"] = _echo_class()()
        twin.register_forward_pre_hook(_with_hashes, with_kwargs=True)
    return twin


def _with_hashes(layer: Any, args: Any, kwargs: Any) -> Any:
    """Give an engram layer hashes, [T, 1] int64, without which it would pass the branch over."""
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)
    if bound.arguments.get("engram_hashes") is None:
        positions = bound.arguments["positions"]
        kwargs = {
            **{k: v for k, v in bound.arguments.items() if k != "self"},
            "engram_hashes": positions.new_zeros((positions.shape[0], 1)),
        }
        return (), kwargs
    return args, kwargs
