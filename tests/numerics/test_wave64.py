"""The replacement of the kernels that are wrong on AMD: found by their text, and called with their arguments.

The launches are the plain twins here, since there is no GPU; `tests/simt` runs the kernels themselves.
"""

from __future__ import annotations

import ast
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dspark_deploy.kernels import mhc_pre  # noqa: E402
from dspark_deploy.plugin import wave64  # noqa: E402
from dspark_deploy.plugin.registry import State  # noqa: E402
from tests.simt import cases, matrix  # noqa: E402
from tests.simt.generate import upstream_file  # noqa: E402
from tests.support import sources  # noqa: E402

WRONG, FIXED = ("0.27.1", "0.30.0"), "0.33.0"


def text_of(version: str, name: str) -> str:
    text = upstream_file(sources.vllm_sources(version)).read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(found) == 1, (version, name, len(found))
    return ast.unparse(found[0])


def kernel_module(version: str, monkeypatch: pytest.MonkeyPatch, name: str = wave64.WITH_NORM) -> Any:
    """A module with the kernel's text and signature, whose body can't run."""
    text = text_of(version, name)
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    module: Any = ModuleType("kernels")
    exec(
        compile(ast.unparse(function), "kernel", "exec"),
        {"tilelang": SimpleNamespace(JITKernel=None)},
        module.__dict__,
    )
    monkeypatch.setattr(inspect, "getsource", lambda _: text)
    return module


@pytest.mark.parametrize("version", WRONG)
@pytest.mark.parametrize("name", wave64.REPLACED)
def test_the_fault_is_in_the_text(version: str, name: str) -> None:
    assert wave64.splits_below_a_wave(text_of(version, name))


def test_right_kernels_are_not_suspected() -> None:
    for name in wave64.REPLACED:
        assert not wave64.splits_below_a_wave(text_of(FIXED, name)), name
    for version in (*WRONG, FIXED):
        # Splits at thread 32 as well, with no reduction on the other side.
        assert not wave64.splits_below_a_wave(text_of(version, "mhc_pre_big_fuse_tilelang")), version


def test_text_and_generated_source_agree() -> None:
    """Sources that `tests/simt` has generated, where they are there."""
    seen = 0
    for job in [*matrix.HALF_NORM, *matrix.RIGHT]:
        stem = job.stem()
        if job.kernel.endswith("with_norm") and stem.with_suffix(".hip").exists():
            found = wave64.misaligned_reductions(stem.with_suffix(".hip").read_text())
            assert bool(found) == (job.origin == matrix.WRONG), (str(job), found)
            seen += 1
    if not seen:
        pytest.skip("no generated sources; run tests/simt first")


def test_upstreams_fix_is_said() -> None:
    assert wave64.misaligned_reductions("tl::AllReduce<tl::SumOp, 64, 1, 32>::run(x)")
    assert not wave64.misaligned_reductions("tl::AllReduce<tl::SumOp, 64, 1, 0>::run(x)")
    assert wave64.patch(ModuleType("empty")).examine().state is State.NOT_APPLICABLE


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = kernel_module(FIXED, monkeypatch)
    assert wave64.patch(fixed).examine().state is State.UPSTREAM
    module = kernel_module(WRONG[0], monkeypatch)
    assert wave64.patch(module).examine().state is None
    wrong = getattr(module, wave64.WITH_NORM)
    setattr(module, wave64.WITH_NORM, _with_another_argument(wrong))
    verdict = wave64.patch(module).examine()
    assert verdict.state is State.REFUSED and "another" in verdict.reason


def _with_another_argument(function: Any) -> Any:
    def changed() -> None: ...

    signature = inspect.signature(function)
    extra = inspect.Parameter("another", inspect.Parameter.KEYWORD_ONLY, default=0)
    changed.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])  # type: ignore[attr-defined]
    return changed


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
        out.copy_(mhc_pre.collapse_ref(pre, residual.float(), weight.float(), eps))
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
]


@pytest.mark.parametrize(("version", "kernel", "options", "launches"), OPTIONS)
def test_a_call_with_upstreams_arguments_is_right(
    version: str,
    kernel: str,
    options: dict[str, Any],
    launches: list[str],
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = cases.UPSTREAM[kernel]
    module = kernel_module(version, monkeypatch, name)
    signature = inspect.signature(getattr(module, name))
    params = cases.compile_time(kernel, 256, options)
    case = cases.case(kernel, 256, 8, params)
    tensors = case.inputs | {
        key: output.inner.view(output.dtype).view(output.shape) for key, output in case.outputs.items()
    }
    positional = [tensors[key] for key in signature.parameters if key in tensors]
    replacement = wave64.TwoLaunches(name, getattr(module, name))
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
    module = kernel_module("0.30.0", monkeypatch)
    params = cases.compile_time("pre_with_norm", 4096, {"n_splits": 8})
    wave64.TwoLaunches(wave64.WITH_NORM, getattr(module, wave64.WITH_NORM)).compile(**params)
    constants = cases.CONSTANTS
    assert asked == [
        ("mix", 8, 4 * 4096, constants),
        ("collapse", 4096, 1e-6, mhc_pre.plan(4096, True), {"stream_zero": False, "write_aux": False}),
    ]
