"""The pass through a loaded model, and the warm-up's refusals, on a model with stand-in mHC operators."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dspark_deploy.plugin.amd import token_counts  # noqa: E402
from dspark_deploy.plugin.amd.compiles import Compiles  # noqa: E402
from dspark_deploy.plugin.amd.layer_pass import LAYERS, LayerPass, StructureError, mhc_models  # noqa: E402
from dspark_deploy.plugin.amd.warmup import NothingToWarmError, warm  # noqa: E402


class Post(torch.nn.Module):
    """Stands for an operator of vLLM's `layers.mhc`; keeps the shapes that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Any) -> Any:
        self.shapes.append(tuple(x.shape))
        return x


Post.__module__ = LAYERS


class Expensive(torch.nn.Module):
    def forward(self, *_args: Any) -> Any:
        raise AssertionError("attention, experts and mono layers are not to run")


class Layer(torch.nn.Module):
    hidden_size, hc_mult = 8, 4

    def __init__(self, engram: bool = False, uses: bool = True) -> None:
        super().__init__()
        self.attn, self.ffn, self.mhc_post = Expensive(), Expensive(), Post()
        self.mono = Expensive()
        self.engram = Expensive() if engram else None
        self.uses, self.hashes = uses, []

    def forward(self, x: Any, positions: Any, engram_hashes: Any = None) -> Any:
        if self.mono is not None:
            return self.mono(x)
        if self.engram is not None and engram_hashes is not None:
            self.hashes.append(tuple(engram_hashes.shape))
            x = self.engram(x, engram_hashes[:, self.engram.layer_hash_index])
        x = self.ffn(self.attn(positions, x))
        return self.mhc_post(x) if self.uses else x


class Model(torch.nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Any, positions: Any, inputs_embeds: Any = None) -> Any:
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, positions)
        return inputs_embeds


@pytest.fixture(autouse=True)
def layers_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(LAYERS)
    monkeypatch.setitem(sys.modules, LAYERS, module)
    return module


def test_operators_run_on_the_shapes_of_the_token_count_and_nothing_else_does() -> None:
    model = Model([Layer(), Layer(engram=True)])
    each = LayerPass(model)
    assert (each.hidden, each.streams, list(each.operators)) == (
        8,
        4,
        ["layers.0.mhc_post", "layers.1.mhc_post"],
    )
    each.run(3)
    assert [layer.mhc_post.shapes for layer in model.layers] == [[(3, 8)], [(3, 8)]]
    assert model.layers[1].hashes == [(3, 1)], "an engram layer takes its branch"


def test_the_loaded_model_is_left_as_it_was() -> None:
    model = Model([Layer(engram=True)])
    LayerPass(model).run(2)
    with pytest.raises(AssertionError, match="not to run"):
        model(None, None, torch.zeros(2, 8))
    assert not model.layers[0]._forward_pre_hooks and isinstance(model.layers[0].engram, Expensive)


def test_models_are_found_below_a_wrapper() -> None:
    model = Model([Layer()])
    wrapper = torch.nn.ModuleDict({"language_model": model, "vision": torch.nn.Linear(1, 1)})
    assert list(mhc_models(wrapper)) == [model]


def test_a_layer_of_another_structure_is_named() -> None:
    layer = Layer()
    del layer.attn
    with pytest.raises(StructureError, match="has no child attn"):
        LayerPass(Model([layer]))


def warmed(model: Any) -> Any:
    return warm({"target": model}, 16, [4], Compiles(), execute=True)


def test_a_model_without_mhc_is_skipped() -> None:
    assert "no model here" in warmed(torch.nn.Linear(1, 1)).skipped


def test_operators_outside_any_list_of_layers_are_an_error() -> None:
    with pytest.raises(NothingToWarmError, match=r"target\.post"):
        warmed(torch.nn.ModuleDict({"post": Post()}))


def test_operators_that_are_never_called_are_an_error() -> None:
    with pytest.raises(NothingToWarmError, match="called none of its mHC operators"):
        warmed(Model([Layer(uses=False)]))


def test_tilelang_without_a_key_is_an_error(layers_module: Any) -> None:
    layers_module.HAS_TILELANG_MHC = True
    with pytest.raises(NothingToWarmError, match="no TileLang key"):
        warmed(Model([Layer()]))


def test_the_warm_up_runs_at_every_count_twice_and_reads_back_who_served() -> None:
    model = Model([Layer()])
    report = warmed(model)
    ran = [shape[0] for shape in model.layers[0].mhc_post.shapes]
    assert ran == [1, *report.token_counts, *report.token_counts]
    assert {1, 2, 4, 16} <= set(report.token_counts) and max(report.token_counts) == 16
    assert report.routes["target.Model"]["Post"] == {"torch": 1 + len(report.token_counts)}


DISPATCH = """
LIMIT = 300
def choose(n):
    def inner():
        return n > 700
    return inner() or n in (5, 90)
"""


def test_constants_and_aiters_tables_become_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch: Any = types.ModuleType(token_counts.DISPATCH_MODULES[1])
    exec(DISPATCH, vars(dispatch))
    aiter: Any = types.ModuleType("aiter.ops.mhc")
    aiter.get_mhc_pre_splitk = lambda tokens, size: (tokens // 450, size)
    monkeypatch.setitem(sys.modules, dispatch.__name__, dispatch)
    monkeypatch.setitem(sys.modules, aiter.__name__, aiter)
    assert {300, 700, 5, 90} <= token_counts.dispatch_constants()
    counts = token_counts.token_counts(1000, [48, 2000], hidden=8, streams=4)
    assert {299, 300, 301, 699, 701, 48, 450, 900, 1000} <= set(counts) and max(counts) == 1000
