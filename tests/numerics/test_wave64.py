"""The replacement of the kernels that are wrong on AMD: found by their text, and called with their arguments.

The launches are the plain twins here, since there is no GPU; `tests/simt` runs the kernels themselves.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dspark_deploy.kernels import mhc_pre  # noqa: E402
from dspark_deploy.plugin import wave64  # noqa: E402
from dspark_deploy.plugin.registry import PatchRefusedError, Registry, State, Verdict  # noqa: E402
from dspark_deploy.plugin.wave64 import lowered  # noqa: E402
from dspark_deploy.plugin.wave64.thread_groups import NotUnderstoodError  # noqa: E402
from dspark_deploy.plugin.wave64.two_launches import TwoLaunches  # noqa: E402
from tests.simt import cases, matrix  # noqa: E402
from tests.simt.generate import upstream_file  # noqa: E402
from tests.support import sources  # noqa: E402

WRONG, FIXED = ("0.27.1", "0.30.0"), "0.33.0"
FAULT = "T.get_thread_binding() < 32"
NORM = "T.reduce_sum(sumsq_per_pos, sumsq, dim=0)"


class Stand:
    """In place of TileLang: kernels are read here, not run."""

    def __getattr__(self, name: str) -> Any:
        return Stand()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return Stand()

    def __getitem__(self, key: Any) -> Any:
        return Stand()


@pytest.fixture(autouse=True)
def _no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests load vLLM's layers, which say that a CPU has no TileLang."""
    monkeypatch.delitem(sys.modules, wave64.LAYERS, raising=False)


def kernel_module(version: str, *edits: tuple[str, str], only: tuple[str, ...] = wave64.EXAMINED) -> Any:
    """vLLM's mHC pre kernels and their helpers, undecorated, with texts replaced; each must be there."""
    text = upstream_file(sources.vllm_sources(version)).read_text()
    parts = ["from __future__ import annotations", "_MIX_ON_TRAILING_THREADS = True"]
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and (node.name in only or node.name.startswith("_is_")):
            node.decorator_list = []
            parts.append(ast.unparse(node))
    source = "\n\n\n".join(parts)
    for old, new in edits:
        assert old in source, (version, old)
        source = source.replace(old, new)
    module: Any = ModuleType("kernels")
    name = f"<{version} {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    vars(module)["T"] = Stand()
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def verdict(module: Any, policy: str = "warn", provider: str = "auto") -> Verdict:
    return wave64.patch(module, policy, provider).examine()


def states(module: Any) -> dict[str, str]:
    return {finding.name: str(finding.state) for finding in wave64.examined(module)}


@pytest.mark.parametrize("version", WRONG)
def test_the_fault_is_in_the_text(version: str) -> None:
    module = kernel_module(version)
    assert states(module) == {wave64.WITH_NORM: "wrong", wave64.BROADCAST: "wrong", wave64.PLAIN: "right"}
    assert verdict(module).state is None
    with_ours = wave64.patch(module, "warn", "auto").install()
    assert wave64.WITH_NORM in with_ours and wave64.BROADCAST in with_ours and "stays" not in with_ours
    assert isinstance(getattr(module, wave64.BROADCAST), TwoLaunches)
    assert inspect.isfunction(getattr(module, wave64.PLAIN))


def test_the_repair_is_in_the_text() -> None:
    module = kernel_module(FIXED)
    assert set(states(module).values()) == {"right"}
    found = verdict(module, "refuse")
    assert found.state is State.UPSTREAM and "multiple of its own size" in found.reason


OTHER_SPELLINGS = [
    "32 > T.get_thread_binding()",
    "T.get_thread_binding() <= 31",
    "T.get_thread_binding(0) < 16 + 16",
    "not T.get_thread_binding() >= 32",
    "T.get_thread_binding() // 32 == 0",
]


@pytest.mark.parametrize("spelling", OTHER_SPELLINGS)
def test_the_fault_is_the_fault_however_it_is_spelled(spelling: str) -> None:
    found = states(kernel_module("0.27.1", (FAULT, spelling)))
    assert found == {wave64.WITH_NORM: "wrong", wave64.BROADCAST: "wrong", wave64.PLAIN: "right"}


def test_a_thread_number_in_a_local_and_a_bound_in_the_module_are_followed() -> None:
    kernel = "with T.Kernel(num_tokens, threads=96) as i:"
    local = (kernel, f"{kernel}\n        tid = T.get_thread_binding()")
    bound = ("_MIX_ON_TRAILING_THREADS = True", "WARP = 32")
    found = states(kernel_module("0.27.1", bound, local, (FAULT, "tid < WARP")))
    assert found[wave64.WITH_NORM] == found[wave64.BROADCAST] == "wrong"
    assert states(kernel_module("0.27.1", (NORM, NORM.replace("_sum", "", 1))))[wave64.WITH_NORM] == "wrong"


def test_a_repair_that_is_switched_off_is_the_fault() -> None:
    flag = "_MIX_ON_TRAILING_THREADS = "
    found = states(kernel_module(FIXED, (f"{flag}True", f"{flag}False")))
    assert found == {wave64.WITH_NORM: "wrong", wave64.BROADCAST: "wrong", wave64.PLAIN: "right"}


def test_another_split_that_starts_at_a_wavefront_is_right() -> None:
    assert set(states(kernel_module("0.27.1", (FAULT, "T.get_thread_binding() < 64"))).values()) == {"right"}


NOT_UNDERSTOOD = {
    "another number of threads": ((FAULT, "T.get_thread_binding() < 16"), "80 threads"),
    "a bound from elsewhere": ((FAULT, "T.get_thread_binding() < hc_mult * 8"), "`hc_mult`"),
    "a name that isn't the module's": ((FAULT, "tid < 32"), "96 threads"),
    "an option that joins all threads": ((FAULT, f"hc_mult and {FAULT}"), "96 threads"),
    "another reduction": ((NORM, NORM.replace("reduce_sum", "reduce_any")), "`T.reduce_any`"),
    "a helper that reduces": ((NORM, "norm_of(sumsq_per_pos, sumsq)"), "`norm_of`"),
    "no reduction": ((NORM, "T.clear(sumsq)"), "reduce nothing"),
    "a number kept in memory": (("rms[0] = 0", "rms[0] = T.get_thread_binding()"), "kept in memory"),
    "a threads count that isn't said": (("threads=96", "threads=n_thr"), "`n_thr`"),
    "a loop that breaks": (("rms[0] = 0", "while rms[0]:\n            rms[0] = 0"), "`while`"),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_never_called_right(name: str) -> None:
    edit, reason = NOT_UNDERSTOOD[name]
    module = kernel_module("0.27.1", edit)
    assert states(module)[wave64.WITH_NORM] == "not understood"
    for policy in ("refuse", "warn", "off"):
        patch = wave64.patch(module, policy, "auto")
        found = patch.examine()
        assert found.state is State.REFUSED and re.search(reason, found.reason), found
        assert ("mhc.provider: aiter or torch" in found.reason) == (policy == "off")
        assert ("the numerics gate measures it" in found.reason) == (policy != "off")
        Registry().apply([patch])  # and the process goes on


def test_a_known_fault_is_replaced_beside_what_is_not_understood() -> None:
    module = kernel_module("0.27.1", only=(wave64.WITH_NORM,))
    other = kernel_module("0.27.1", (NORM, "T.clear(sumsq)"), only=(wave64.BROADCAST,))
    setattr(module, wave64.BROADCAST, getattr(other, wave64.BROADCAST))
    patch = wave64.patch(module, "warn", "auto")
    assert patch.examine().state is None
    assert f"stays: {wave64.BROADCAST} is not understood" in patch.install()
    assert isinstance(getattr(module, wave64.WITH_NORM), TwoLaunches)
    assert not isinstance(getattr(module, wave64.BROADCAST), TwoLaunches)


def test_each_kernel_is_examined_by_itself() -> None:
    both = (wave64.WITH_NORM, wave64.BROADCAST)
    for name, other in (both, both[::-1]):
        alone = kernel_module("0.27.1", only=(name,))
        assert verdict(alone).state is None and verdict(alone, "refuse").state is State.REFUSED
        setattr(alone, other, getattr(kernel_module(FIXED, only=(other,)), other))
        assert states(alone) == {name: "wrong", other: "right"}
        wave64.patch(alone, "warn", "auto").install()
        kept, replaced = vars(alone)[other], vars(alone)[name]
        assert isinstance(replaced, TwoLaunches) and not isinstance(kept, TwoLaunches)


def test_with_refuse_a_wrong_kernel_stops_the_process_and_says_what_to_do() -> None:
    with pytest.raises(PatchRefusedError) as caught:
        Registry().apply([wave64.patch(kernel_module("0.27.1"), "refuse", "auto")])
    message = str(caught.value)
    for part in ("threads 32 to 95", wave64.BROADCAST, "vLLM 0.31", "mhc.provider: aiter", "mhc.gate: warn"):
        assert part in message, message


def test_where_nothing_calls_the_kernels_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernel_module("0.27.1")
    for provider in ("aiter", "torch"):
        found = verdict(module, "refuse", provider)
        assert found.state is State.NOT_APPLICABLE and provider in found.reason
    assert verdict(module, "refuse", "tilelang").state is State.REFUSED
    monkeypatch.setitem(sys.modules, wave64.LAYERS, SimpleNamespace(HAS_TILELANG_MHC=False))
    found = verdict(module, "refuse")
    assert found.state is State.NOT_APPLICABLE and "HAS_TILELANG_MHC" in found.reason
    monkeypatch.setitem(sys.modules, wave64.LAYERS, SimpleNamespace(HAS_TILELANG_MHC=True))
    assert verdict(module, "refuse").state is State.REFUSED
    assert verdict(ModuleType("empty")).state is State.NOT_APPLICABLE


def test_a_wrong_kernel_with_other_arguments_is_not_replaced() -> None:
    name = wave64.WITH_NORM
    module = kernel_module("0.27.1", ("norm_eps: float,", "norm_eps: float, another: int,"), only=(name,))
    found = verdict(module)
    assert found.state is State.REFUSED and "unknown ['another']" in found.reason


def test_text_and_generated_source_agree() -> None:
    """Sources that `tests/simt` has generated, where they are there."""
    seen = 0
    for job in [*matrix.HALF_NORM, *matrix.RIGHT]:
        stem = job.stem()
        if job.kernel in matrix.PRE and stem.with_suffix(".hip").exists():
            found = lowered.misaligned(stem.with_suffix(".hip").read_text())
            text = states(kernel_module(job.origin))[cases.UPSTREAM[job.kernel]]
            assert text == ("wrong" if found else "right"), (str(job), found, text)
            seen += 1
    if not seen:
        pytest.skip("no generated sources; run tests/simt first")


def test_a_generated_source_is_read() -> None:
    assert lowered.misaligned("tl::AllReduce<tl::SumOp, 64, 1, 32>::run(x)")
    assert not lowered.misaligned("tl::AllReduce<tl::SumOp, 64, 1, 0>::run(x)")
    for other in (
        "x = y;",
        "AllReduce<tl::SumOp, 64, 1, 0>(); __shfl_xor(v, 32);",
        "AllReduce<Op, N>::run(x)",
    ):
        with pytest.raises(NotUnderstoodError):
            lowered.misaligned(other)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches go to the twins, and are listed."""
    names: list[str] = []

    def mix(mul: Any, sqrsum: Any, scale: Any, base: Any, constants: Any, numel: int, out: Any) -> None:
        names.append("mix")
        for target, value in zip(
            out, mhc_pre.mix_ref(mul, sqrsum, scale, base, constants, numel), strict=True
        ):
            target.copy_(value.view_as(target))

    def collapse(pre: Any, residual: Any, weight: Any, eps: float, out: Any, aux: Any) -> None:
        names.append("collapse")
        out.copy_(
            mhc_pre.collapse_ref(pre, residual.float(), None if weight is None else weight.float(), eps)
        )
        if aux is not None:
            aux.copy_(residual.float().mean(1))

    monkeypatch.setattr(mhc_pre, "mix", mix)
    monkeypatch.setattr(mhc_pre, "collapse", collapse)
    return names


OPTIONS: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("0.27.1", "pre_with_norm", {}, ["mix", "collapse"]),
    ("0.27.1", "pre_with_norm", {"n_splits": 8}, ["mix", "collapse"]),
    ("0.27.1", "pre_broadcast_with_norm", {}, ["mix", "collapse"]),
    ("0.30.0", "pre_with_norm", {}, ["mix", "collapse"]),
    ("0.30.0", "pre_with_norm", {"save_pre_mix": True, "use_pre_mix_in": True}, ["mix", "collapse"]),
    ("0.30.0", "pre_with_norm", {"save_pre_mix": True}, ["mix", "collapse"]),
    ("0.27.1", "pre", {}, ["mix", "collapse"]),
    ("0.30.0", "pre", {"save_pre_mix": True, "rms_numel": 256, "write_aux": True}, ["mix", "collapse"]),
]


@pytest.mark.parametrize(("version", "kernel", "options", "launches"), OPTIONS)
def test_a_call_with_upstreams_arguments_is_right(
    version: str,
    kernel: str,
    options: dict[str, Any],
    launches: list[str],
    launched: list[str],
) -> None:
    name = cases.UPSTREAM[kernel]
    module = kernel_module(version)
    signature = inspect.signature(getattr(module, name))
    params = cases.compile_time(kernel, 256, options)
    case = cases.case(kernel, 256, 8, params)
    tensors = case.inputs | {key: output.tensor for key, output in case.outputs.items()}
    positional = [tensors[key] for key in signature.parameters if key in tensors]
    replacement = TwoLaunches(name, getattr(module, name))
    replacement(*positional, **params)
    assert launched == launches
    for output, error in cases.errors(case).items():
        if output in signature.parameters:
            assert error.right, (version, kernel, options, output, error)


def test_compiling_ahead_asks_for_what_a_call_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(mhc_pre, "mix_kernel", lambda *key: asked.append(("mix", *key)))
    monkeypatch.setattr(
        mhc_pre, "collapse_kernel", lambda *key, **options: asked.append(("collapse", *key, options))
    )
    module = kernel_module("0.30.0")
    params = cases.compile_time("pre_with_norm", 4096, {"n_splits": 8})
    TwoLaunches(wave64.WITH_NORM, getattr(module, wave64.WITH_NORM)).compile(**params)
    constants = cases.CONSTANTS
    assert asked == [
        ("mix", 8, 4 * 4096, constants),
        ("collapse", 4096, 1e-6, mhc_pre.plan(4096, True), {"stream_zero": False, "write_aux": False}),
    ]
