"""The tail of DeepSeek-V4.1's draft, on the operator that the rest of the model uses.

On ROCm the draft applies the last mHC post block with `mhc_post_torch`, a chain of small torch kernels, while
every other layer uses `MHCPostOp`, which goes to AITER, else to TileLang, else to that same function. The
draft's `forward` looks the function up in its module; here the name is bound to a call of an `MHCPostOp`.

The operator is made inside the model's `__init__`, since a vLLM CustomOp takes its dispatch from the
configuration that is current when it is made. DeepSeek-V4's draft uses the operator already (`upstream`).

Not covered: the numbers of AITER's and TileLang's kernels, which differ from torch's in rounding.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import ModuleType
from typing import Any

from dspark_deploy.plugin.registry import READY, Patch, Verdict, refused, upstream

CLASS = "DSparkDeepseekV4Model"
FUNCTION = "mhc_post_torch"
ATTRIBUTE = "dspark_deploy_mhc_post"
# What a decoder layer or a model calls its MHCPostOp, or the method around it.
OPERATORS = ("hc_post", "mhc_post")
PARAMETERS = ["x", "residual", "post_layer_mix", "comb_res_mix"]


def patch(module: ModuleType) -> Patch:
    """The patch of one loaded draft module, `vllm.models.<family>.amd.dspark`."""
    family = module.__name__.split(".")[-3]
    return Patch(
        f"fused-post:{family}",
        f"{module.__name__}.{CLASS}.forward",
        "the draft's last mHC post block runs as one kernel",
        functools.partial(examine, module),
        functools.partial(install, module),
    )


def examine(module: ModuleType) -> Verdict:
    """Find the tail by the calls in `forward`'s source. Reads, and changes nothing."""
    model = getattr(module, CLASS, None)
    if model is None:
        return refused(f"{module.__name__} has no class {CLASS}")
    forward = inspect.unwrap(model.forward)
    body = _body(forward)
    operators = _operator_calls(body)
    if FUNCTION not in forward.__code__.co_names:
        if operators:
            return upstream("the draft's tail is on the mHC post operator")
        return refused(
            f"{CLASS}.forward calls neither {FUNCTION} nor, after its layers, an mHC post operator"
        )
    if operators:
        return refused(
            f"{CLASS}.forward has {FUNCTION} and, after its layers, a call of an mHC post operator as well; "
            f"the patch is for {FUNCTION} alone"
        )
    calls = _calls(body)
    if len(calls) != 1 or len(calls[0].args) != len(PARAMETERS) or calls[0].keywords:
        shapes = [f"{len(call.args)} arguments, {len(call.keywords)} keywords" for call in calls]
        return refused(
            f"{CLASS}.forward has {len(calls)} call(s) of {FUNCTION} ({'; '.join(shapes)}), "
            f"and the patch is for one call with {len(PARAMETERS)} arguments"
        )
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        return refused(f"{module.__name__} does not hold {FUNCTION} as a name of its own")
    return _examine_signatures(function)


def _body(forward: Any) -> list[ast.stmt]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition.body


def _calls(body: list[ast.stmt]) -> list[ast.Call]:
    return [
        node
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == FUNCTION
    ]


def _operator_calls(body: list[ast.stmt]) -> list[ast.Call]:
    """Calls of an mHC post operator after the loop over the layers, of which the result is used.

    A mention is no call: a flag or a method of that name may be asked for and never be applied.
    """
    loops = [number for number, statement in enumerate(body) if isinstance(statement, ast.For)]
    nodes = [node for statement in body[max(loops, default=-1) + 1 :] for node in ast.walk(statement)]
    dropped = [node.value for node in nodes if isinstance(node, ast.Expr)]
    return [
        node
        for node in nodes
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
        in OPERATORS
        and len(node.args) + len(node.keywords) == len(PARAMETERS)
        and node not in dropped
    ]


def _examine_signatures(function: Any) -> Verdict:
    from vllm.model_executor.layers.mhc import MHCPostOp

    operator = list(inspect.signature(MHCPostOp.forward_native).parameters)[1:]
    for name, found in (
        (FUNCTION, list(inspect.signature(function).parameters)),
        ("MHCPostOp.forward_native", operator),
    ):
        if found != PARAMETERS:
            return refused(
                f"{name} takes ({', '.join(found)}), and the patch is for ({', '.join(PARAMETERS)})"
            )
    return READY


def install(module: ModuleType) -> str:
    """Make an operator in the model's `__init__`, and bind the tail's function name to it."""
    from vllm.model_executor.layers.mhc import MHCPostOp

    model: Any = getattr(module, CLASS)
    build = model.__init__
    # The operator holds no weights; one made under this process's configuration serves every instance.
    made: list[Any] = []

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        operator = MHCPostOp()
        setattr(self, ATTRIBUTE, operator)
        made[:] = [operator]

    def mhc_post(x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any) -> Any:
        """[T, H], [T, 4, H], [T, 4, 1], [T, 4, 4] to [T, 4, H], as the function it stands for."""
        if not made:
            raise RuntimeError(
                f"dspark-deploy: the draft's tail was called before any {CLASS} was built; "
                f"remove the fused-post patch by starting vLLM without dspark-serve, and report this"
            )
        return made[0](x, residual, post_layer_mix, comb_res_mix)

    model.__init__ = __init__
    setattr(module, FUNCTION, mhc_post)
    return f"{FUNCTION} is an MHCPostOp, built with the model"
