"""AITER as the preflight sees it: which functions it has, and how this vLLM calls them. Nothing is imported.

AITER's distribution is `amd-aiter`, and it comes with AMD's images; its signatures have changed while its
module names stayed, and vLLM asks only whether it is importable. A wrong pair fails in the first forward,
minutes after the start. So both sources are parsed: the functions that AITER defines, and the calls that
vLLM makes to them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Annotated

from pydantic import Field

OPS = "ops/mhc.py"
Least = Annotated[int, Field(ge=0)]
Most = Annotated[int, Field(ge=-1)]
DELAYED = "ops/triton/fusions/mhc_fused_post_pre_delayed_rmsnorm.py"


@dataclass(frozen=True, slots=True)
class Aiter:
    """`functions` holds the least and the most positional arguments by name, -1 meaning any number.

    `calls` holds the numbers of positional arguments with which vLLM calls each. `needs_delayed` says that
    this vLLM uses the fused module with the delayed norm, `has_delayed` that AITER has it. `problem` says
    why AITER could not be read.
    """

    functions: dict[str, tuple[Least, Most]] = field(default_factory=dict)
    calls: dict[str, list[Least]] = field(default_factory=dict)
    needs_delayed: bool = False
    has_delayed: bool = False
    problem: str = ""

    def mismatches(self) -> list[str]:
        """Calls that would fail: one sentence each."""
        found = []
        for name, counts in sorted(self.calls.items()):
            if name not in self.functions:
                found.append(f"vLLM calls aiter.ops.mhc.{name}, which this AITER has not")
                continue
            least, most = self.functions[name]
            for count in counts:
                if count < least or 0 <= most < count:
                    takes = f"{least} to {most}" if most >= 0 else f"{least} or more"
                    found.append(f"vLLM calls {name} with {count} arguments, and this AITER takes {takes}")
        return found


def read_aiter() -> Aiter | None:
    """What is installed here; None where there is no AITER."""
    aiter, vllm = _package("aiter"), _package("vllm")
    if aiter is None:
        return None
    try:
        functions = defined_functions((aiter / OPS).read_text()) if (aiter / OPS).is_file() else {}
        source = (vllm / "_aiter_ops.py").read_text() if vllm is not None else ""
        calls = positional_calls(source)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return Aiter(problem=f"{aiter}: {error}")
    module = DELAYED.removesuffix(".py").replace("/", ".")
    return Aiter(functions, calls, f"aiter.{module}" in source, (aiter / DELAYED).is_file())


def _package(name: str) -> Path | None:
    """The folder of a top-level package, found without importing it."""
    spec: ModuleSpec | None = PathFinder.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(folders[0]) if folders else None


def defined_functions(source: str) -> dict[str, tuple[int, int]]:
    """Functions at the top of a module: the least and the most positional arguments that each takes."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            positional = len(node.args.posonlyargs) + len(node.args.args)
            least = positional - len(node.args.defaults)
            found[node.name] = (least, -1 if node.args.vararg else positional)
    return found


def positional_calls(source: str) -> dict[str, list[int]]:
    """Calls of names that a function imports from `aiter.ops.mhc`: the numbers of arguments of each.

    A call that unpacks a sequence has no number, and is left out; keywords count as arguments.
    """
    found: dict[str, set[int]] = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {
            alias.asname or alias.name: alias.name
            for node in ast.walk(function)
            if isinstance(node, ast.ImportFrom) and node.module == "aiter.ops.mhc"
            for alias in node.names
        }
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names):
                continue
            if not any(isinstance(argument, ast.Starred) for argument in node.args):
                found.setdefault(names[node.func.id], set()).add(len(node.args) + len(node.keywords))
    return {name: sorted(counts) for name, counts in found.items()}
