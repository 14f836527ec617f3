"""What no source of the product does: run text as code, unpickle, start a shell, build objects from YAML."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for name in ("dspark_deploy", "tuning", "profiles", "bench") for path in (ROOT / name).rglob("*.py")
)
CALLS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "commands", "pty", "telnetlib"}
SHELLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
}
YAML_LOADS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"}
LOADING = {"yaml.compose", "yaml.parse", "yaml.scan"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def faults(source: str) -> Iterator[str]:
    """What a module does that none may."""
    tree = ast.parse(source)
    names: dict[str, str] = {}  # what an imported name stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
                if top in MODULES:
                    yield f"{node.lineno}: import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            if node.module.partition(".")[0] in MODULES:
                yield f"{node.lineno}: from {node.module}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        spelt = dotted(node.func)
        first, dot, rest = spelt.partition(".")
        # What isn't imported is a variable here, or a builtin.
        name = f"{names.get(first, '' if dot else first)}{dot}{rest}"
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if spelt in CALLS or name.removeprefix("builtins.") in CALLS or name in SHELLS | YAML_LOADS:
            yield f"{node.lineno}: {name}"
        if name in LOADING and not dotted(keywords.get("Loader", ast.Constant(None))).endswith("SafeLoader"):
            yield f"{node.lineno}: {name} without the safe loader"
        if (
            name.startswith("ruamel.yaml.YAML")
            and "typ" in keywords
            and ast.unparse(keywords["typ"]) != "'safe'"
        ):
            yield f"{node.lineno}: YAML(typ={ast.unparse(keywords['typ'])})"
        if "shell" in keywords and ast.unparse(keywords["shell"]) != "False":
            yield f"{node.lineno}: {name}(shell={ast.unparse(keywords['shell'])})"
        if name == "torch.load" and ast.unparse(keywords.get("weights_only", ast.Constant(None))) != "True":
            yield f"{node.lineno}: torch.load without weights_only=True"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_what_it_reads(path: Path) -> None:
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "import builtins as b\nb.exec(x)",
        "from builtins import eval as harmless\nharmless(x)",
        "import pickle",
        "from dill import loads",
        "import marshal as m",
        "import os as o\no.system('ls')",
        "from os import system\nsystem('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=flag)",
        "import yaml\nyaml.load(x, Loader=yaml.SafeLoader)",
        "import yaml\nyaml.compose(x)",
        "import yaml\nyaml.compose(x, Loader=yaml.UnsafeLoader)",
        "from ruamel.yaml import YAML\nYAML(typ='unsafe')",
        "import torch\ntorch.load(x)",
    ],
)
def test_each_of_them_would_be_seen(source: str) -> None:
    assert list(faults(source))


def test_what_is_harmless_is_not_named() -> None:
    source = "import re, yaml, subprocess, torch\nre.compile('x')\nmodule.eval()\nyaml.safe_load(x)\n"
    source += "yaml.compose(x, Loader=yaml.SafeLoader)\nsubprocess.run(['ls'], shell=False)\n"
    source += "torch.load(x, weights_only=True)\ntilelang_jit.compile(x)\n"
    assert list(faults(source)) == []
