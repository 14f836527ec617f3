"""Over which threads a TileLang kernel reduces, read from its Python text.

    reductions(function)      {range of threads: what is reduced there}, or NotUnderstoodError

The body below `T.Kernel(..., threads=N)` is walked with the set of threads that reach each statement. A
branch on the thread's number splits the set, however it is spelled: a comparison either way round, a local or
module-level name, a module-level helper. What the text doesn't decide, such as `split_mode != "input"`, is
tried both ways. Anything that isn't known to be harmless raises: a kernel is called right only where every
part of it was understood.

Not covered: what TileLang makes of the text; `lowered` reads that.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from dspark_deploy.plugin.source import function_text

REDUCTIONS = {"reduce", "reduce_sum", "reduce_max", "reduce_min", "reduce_abssum", "reduce_absmax"}
# Calls of `T` that exchange nothing between threads beyond a copy, which brings its own barriers.
HARMLESS = {
    *("Kernel", "Parallel", "Pipelined", "serial", "unroll", "vectorized", "dynamic", "ceildiv"),
    *("alloc_fragment", "alloc_shared", "alloc_local", "clear", "fill", "copy", "if_then_else"),
    *("sigmoid", "exp", "rsqrt", "max", "min", "cast", "float32", "bfloat16", "pdl_sync", "pdl_trigger"),
}
THREAD = "get_thread_binding"
MOST_CHOICES = 6
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv},
    **{ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor},
    **{ast.LShift: operator.lshift, ast.RShift: operator.rshift},
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne},
}


class NotUnderstoodError(Exception):
    """A kernel's text holds what isn't known here. The message names it, with its line in the kernel."""


class Group:
    """What one set of threads does together: its reductions, by their text, and the names it uses."""

    def __init__(self) -> None:
        self.reductions: set[str] = set()
        self.names: set[str] = set()
        self.thread = False  # whether the thread's number is asked for

    def add(self, other: Group) -> None:
        """Take in what these threads do as well."""
        self.reductions |= other.reductions
        self.names |= other.names


def reductions(function: Callable[..., Any]) -> dict[range, set[str]]:
    """The reductions of a kernel function by the threads that make them, over every way its options may go.

    Raises NotUnderstoodError, also for a kernel with `norm_weight` whose norm is reduced nowhere.
    """
    groups = _groups(function)
    if "norm_weight" in inspect.signature(function).parameters and not any(
        group.reductions and "norm_weight" in group.names for group in groups.values()
    ):
        raise NotUnderstoodError("the threads that use norm_weight reduce nothing")
    return {_as_range(threads): each.reductions for threads, each in groups.items() if each.reductions}


def aligned(threads: range) -> bool:
    """Whether a reduction over them stays right when shuffles ignore where the group starts.

    Raises NotUnderstoodError where their number is no power of two.
    """
    size = len(threads)
    if size & (size - 1):
        raise NotUnderstoodError(f"a reduction over {size} threads, {threads.start} to {threads.stop - 1}")
    return threads.start % size == 0


def _as_range(threads: frozenset[int]) -> range:
    found = range(min(threads), max(threads) + 1)
    if len(found) != len(threads):
        raise NotUnderstoodError(f"a reduction over scattered threads, {len(threads)} of {found}")
    return found


@functools.cache
def _asks_for_thread(function: Callable[..., Any]) -> bool:
    return any(_attribute(each) == THREAD for each in ast.walk(_definition(function)))


@functools.cache
def _definition(function: Callable[..., Any]) -> ast.FunctionDef:
    try:
        tree = ast.parse(function_text(function))
    except (OSError, SyntaxError) as error:
        raise NotUnderstoodError(f"its text can't be read: {error}") from error
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise NotUnderstoodError("its text is no function definition")
    return tree.body[0]


def _groups(function: Callable[..., Any]) -> dict[frozenset[int], Group]:
    definition = _definition(function)
    launches = [node for node in definition.body if isinstance(node, ast.With)]
    if len(launches) != 1 or _attribute(launches[0].items[0].context_expr) != "Kernel":
        raise NotUnderstoodError(f"{len(launches)} `with` at its top level instead of one, `T.Kernel`")
    launch = launches[0]
    for node in definition.body:
        if node is not launch and any(_attribute(each) == "Kernel" for each in ast.walk(node)):
            raise NotUnderstoodError(f"line {node.lineno}: another `T.Kernel`")
    scope = _Scope(function)
    call: Any = launch.items[0].context_expr
    given = [keyword.value for keyword in call.keywords if keyword.arg == "threads"]
    threads = scope.number(given[0], 0) if given else None
    if len(launch.items) != 1 or not isinstance(threads, int):
        raise NotUnderstoodError("no number of `threads` in its `T.Kernel`")
    scope.learn(launch)
    atoms = scope.atoms(launch)
    if len(atoms) > MOST_CHOICES:
        raise NotUnderstoodError(f"{len(atoms)} conditions beside the thread's number: {', '.join(atoms)}")
    groups: dict[frozenset[int], Group] = {}
    for values in itertools.product((False, True), repeat=len(atoms)):
        scope.choices = dict(zip(atoms, values, strict=True))
        _walk(launch.body, frozenset(range(threads)), scope, groups)
    return groups


def _walk(
    body: list[ast.stmt], threads: frozenset[int], scope: _Scope, groups: dict[frozenset[int], Group]
) -> None:
    if not threads:
        return
    group = groups.setdefault(threads, Group())
    for node in body:
        if isinstance(node, ast.If):
            group.add(scope.read(node.test))
            if scope.depends(node.test):
                taken = frozenset(thread for thread in threads if scope.truth(node.test, thread))
                _walk(node.body, taken, scope, groups)
                _walk(node.orelse, threads - taken, scope, groups)
            else:
                _walk(node.body, threads, scope, groups)
                _walk(node.orelse, threads, scope, groups)
        elif isinstance(node, ast.For) and not node.orelse:
            if scope.depends(node.iter):
                raise NotUnderstoodError(f"line {node.lineno}: a loop over the thread's number")
            group.add(scope.read(node.iter))
            _walk(node.body, threads, scope, groups)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Pass)):
            group.add(scope.read(node))
        else:
            raise NotUnderstoodError(f"line {node.lineno}: a statement `{type(node).__name__.lower()}`")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement, those within branches and loops after the one they are in."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.For)):
            yield from _statements([*node.body, *node.orelse])


def _attribute(node: ast.AST) -> str | None:
    """`name` of a call `T.name(...)`."""
    func = node.func if isinstance(node, ast.Call) else None
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "T":
        return func.attr
    return None


@functools.cache
def _scope(function: Callable[..., Any]) -> _Scope:
    return _Scope(function)


class _Scope:
    """What names mean in a kernel: its module's, and locals made of the thread's number.

    `choices` is the way that this walk goes at conditions that the text doesn't decide.
    """

    def __init__(self, function: Any) -> None:
        code = function.__code__
        shadowed = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self.globals = {key: value for key, value in function.__globals__.items() if key not in shadowed}
        self.locals: dict[str, ast.expr] = {}
        self.choices: dict[str, bool] = {}
        self._read: dict[ast.AST, Group] = {}
        self._helpers: dict[tuple[Any, int], Any] = {}
        self._depends: dict[ast.AST, bool] = {}
        self._atoms: dict[ast.AST, str] = {}

    def read(self, node: ast.AST) -> Group:
        """What a statement calls and names. Raises for a call that isn't known."""
        if node not in self._read:
            self._read[node] = found = Group()
            for each in ast.walk(node):
                if isinstance(each, ast.Name):
                    found.names.add(each.id)
                if not isinstance(each, ast.Call):
                    continue
                name = _attribute(each)
                if name in REDUCTIONS:
                    found.reductions.add(ast.unparse(each))
                elif name == THREAD or self.helper(each) is not None:
                    found.thread = True
                elif name not in HARMLESS:
                    called = ast.unparse(each.func)
                    raise NotUnderstoodError(f"line {each.lineno}: `{called}`, of which nothing is known")
        return self._read[node]

    def helper(self, call: ast.Call) -> Any:
        """The module-level function behind `name()`, if it is about the thread's number."""
        function = self.globals.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if not inspect.isfunction(function) or call.args or call.keywords:
            return None
        return function if _asks_for_thread(function) else None

    def depends(self, node: ast.AST) -> bool:
        """Whether an expression's value differs between threads."""
        if node not in self._depends:
            self._depends[node] = self._thread_in(node)
        return self._depends[node]

    def _may_depend(self, node: ast.stmt) -> bool:
        read = self.read(node)
        return read.thread or bool(read.names & self.locals.keys())

    def _thread_in(self, node: ast.AST) -> bool:
        return any(
            (isinstance(each, ast.Name) and each.id in self.locals)
            or (isinstance(each, ast.Call) and (_attribute(each) == THREAD or self.helper(each) is not None))
            for each in ast.walk(node)
        )

    def learn(self, launch: ast.With) -> None:
        """Find the locals made of the thread's number. Raises where one is more than one plain name."""
        assigned: dict[str, int] = {}
        for node in _statements(launch.body):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                for name in names:
                    assigned[name] = assigned.get(name, 0) + 1
                # The names of `T` and helpers first: most statements have neither, nor a local of this kind.
                if node.value is not None and self._may_depend(node) and self.depends(node.value):
                    if len(names) != 1 or len(targets) != 1:
                        raise NotUnderstoodError(f"line {node.lineno}: the thread's number is kept in memory")
                    self.locals[names[0]] = node.value
        self._depends.clear()
        twice = [name for name in self.locals if assigned[name] > 1]
        if twice:
            raise NotUnderstoodError(f"`{twice[0]}` holds the thread's number and is assigned twice")

    def atoms(self, launch: ast.With) -> list[str]:
        """Conditions beside the thread's number that decide branches along with it, by their text."""
        for node in _statements(launch.body):
            if isinstance(node, ast.If) and self.depends(node.test):
                self._find_atoms(node.test)
        return sorted(set(self._atoms.values()))

    def _find_atoms(self, node: ast.expr) -> None:
        if not self.depends(node):
            try:
                self.number(node, 0)
            except NotUnderstoodError:
                self._atoms[node] = ast.unparse(node)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                self._find_atoms(value)
        elif isinstance(node, ast.UnaryOp):
            self._find_atoms(node.operand)

    def truth(self, node: ast.expr, thread: int) -> bool:
        """A condition's value in one thread."""
        if node in self._atoms:
            return self.choices[self._atoms[node]]
        if isinstance(node, ast.BoolOp):
            values = (self.truth(value, thread) for value in node.values)
            return all(values) if isinstance(node.op, ast.And) else any(values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.truth(node.operand, thread)
        return bool(self.number(node, thread))

    def number(self, node: ast.expr, thread: int) -> Any:
        """An expression's value in one thread. Raises where the text doesn't say it."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.locals:
            return self.number(self.locals[node.id], thread)
        if isinstance(node, ast.Name) and isinstance(self.globals.get(node.id), int):
            return self.globals[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self.number(node.left, thread), self.number(node.right, thread))
        if isinstance(node, ast.Compare) and all(type(op) in OPERATORS for op in node.ops):
            sides = [self.number(side, thread) for side in (node.left, *node.comparators)]
            pairs = zip(node.ops, itertools.pairwise(sides), strict=True)
            return all(OPERATORS[type(op)](left, right) for op, (left, right) in pairs)
        if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            return self.truth(node, thread)
        if isinstance(node, ast.Call):
            if (
                _attribute(node) == THREAD
                and not node.keywords
                and [*map(ast.unparse, node.args)] in ([], ["0"])
            ):
                return thread
            helper = self.helper(node)
            if helper is not None:
                if (helper, thread) not in self._helpers:
                    value = _scope(helper).returned(_definition(helper).body, thread)
                    self._helpers[helper, thread] = value
                return self._helpers[helper, thread]
        raise NotUnderstoodError(
            f"line {node.lineno}: `{ast.unparse(node)}`, whose value the text doesn't say"
        )

    def returned(self, body: list[ast.stmt], thread: int) -> Any:
        """What a helper of conditions and returns gives in one thread."""
        for node in body:
            if isinstance(node, ast.Return) and node.value is not None:
                return self.number(node.value, thread)
            if isinstance(node, ast.If):
                found = self.returned(node.body if self.truth(node.test, thread) else node.orelse, thread)
                if found is not None:
                    return found
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                raise NotUnderstoodError(f"line {node.lineno}: `{ast.unparse(node)}` in a helper")
        return None
