"""Names as Python resolves them: what a name of a schedule function means, where that is certain.

A name that a function binds anywhere is a local of all of the function, however its module may use the name. Any other
is a global of the function's module, or a builtin. Globals may change while a program runs, and calls that are not read
may change anything; so a global counts only if its module binds it once and in no function, and data only if it cannot
be changed in place. Everything else is outside of what is read.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from optcc.collective import Collective
from optcc.dsl import PURE, Definition
from optcc.schedule import Schedule

PURE_BUILTINS = (
    *(abs, bool, enumerate, float, int, len, list, max, min, range, reversed, sorted, sum, tuple, zip),
    *(Fraction, product),
)
PURE_NUMPY = ("argmax", "argmin", "argsort", "array", "cumsum", "float64", "int64", "maximum", "minimum", "sort")
_FILES_KEPT = 64
_KIND_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
_CHANGES_NAMES = frozenset(
    (
        *("globals", "vars", "locals", "exec", "eval", "compile", "setattr", "delattr", "__setattr__", "__delattr__"),
        *("__dict__", "__builtins__", "attrgetter", "modules", "__import__"),
    )
)
"""What a module uses that may change names in ways that its source does not show."""
_CHANGES_FUNCTIONS = frozenset(("__code__", "__defaults__", "__kwdefaults__", "__globals__", "f_globals", "f_builtins"))
"""What a module uses that changes a function, or the names of one."""


class Uncertain(Exception):
    """Why it is not certain what a function or a name is."""


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """The names that one function sees: its `locals`, the globals of its module, builtins.

    `set_elsewhere` are those that a module among those read so far may bind in another one.
    """

    function: str
    locals: frozenset[str]
    globals: dict[str, Any]
    file: str
    first_line: int
    assumed: list[str]
    set_elsewhere: set[str]

    def look_up(self, name: str) -> Any:
        """The value of a global or a builtin; raises Uncertain for one that may have another value later."""
        if name in self.locals:
            raise Uncertain(f"{name}: has no value here, or is carried from one iteration to the next")
        if name in self.globals:
            value = self.globals[name]
            module = _bindings(tuple(linecache.getlines(self.file)))
            is_changed = module.bound[name] != 1 or name in self.set_elsewhere
            if is_changed or (module.hides and not _is_code(value)):
                raise Uncertain(f"{name}: a global that its module may change")
            if not _is_code(value) and not is_constant(value):
                raise Uncertain(f"{name}: a global that can be changed in place")
            if not _is_code(value):
                where = Path(self.file).name
                self.assumed.append(f"{where}: the global {name}, which its module binds once, is always {value!r}")
            return value
        if name in BUILTINS and getattr(builtins, name) is BUILTINS[name] and name not in self.set_elsewhere:
            return BUILTINS[name]
        raise Uncertain(f"{name}: not known here, or carried from one iteration to the next")


BUILTINS = dict(vars(builtins))


def read_function(
    function: Callable[..., Any], assumed: list[str], set_elsewhere: set[str]
) -> tuple[ast.FunctionDef, Names]:
    """The syntax tree of a plain function, and its names, which add to `assumed` what their meaning rests on; what its
    module may bind in another one is added to `set_elsewhere`.

    Raises Uncertain unless this is surely what it executes.
    """
    name = getattr(function, "__name__", "?")
    if not inspect.isfunction(function) or set(vars(function)) - {PURE} or function.__code__.co_freevars:
        raise Uncertain(f"{name}: is wrapped, or sees the variables of another function")
    if getattr(function, "__builtins__", None) is not vars(builtins):
        raise Uncertain(f"{name}: has builtins of its own")
    code = function.__code__
    try:
        linecache.checkcache(code.co_filename)
        lines, first_line = inspect.getsourcelines(function)
        found = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError):
        raise Uncertain(f"{name}: has no source") from None
    if not isinstance(found, ast.FunctionDef):
        raise Uncertain(f"{name}: is no plain function")
    written = _codes(code.co_filename, tuple(linecache.getlines(code.co_filename)))
    made = written.get((code.co_name, code.co_firstlineno))
    if made is None or not _same(made, code):
        raise Uncertain(f"{name}: its source is not what it executes")
    for node in ast.walk(found):
        if isinstance(node, ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom | ast.Await | ast.NamedExpr):
            raise Uncertain(f"{name}: {type(node).__name__.lower()} in line {first_line + node.lineno - 1}")
    if note_module(code.co_filename, set_elsewhere):
        where = Path(code.co_filename).name
        assumed.append(f"{where}: nothing changes {name}, or binds a name of it anew, by a way that the source hides")
    bound = frozenset((*code.co_varnames, *code.co_cellvars))
    return found, Names(name, bound, function.__globals__, code.co_filename, first_line, assumed, set_elsewhere)


def may_give(configure: Callable[..., Any], name: str) -> bool:
    """True if the source of a function that makes parameters names this one, or cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(configure)))
    except (OSError, TypeError, SyntaxError):
        return True
    return any(
        (isinstance(node, ast.Constant) and node.value == name) or (isinstance(node, ast.keyword) and node.arg == name)
        for node in ast.walk(tree)
    )


def note_module(file: str, set_elsewhere: set[str]) -> bool:
    """Adds to `set_elsewhere` what a module may bind in another one; whether it may hide some of what it binds.

    Raises Uncertain if it changes functions.
    """
    module = _bindings(tuple(linecache.getlines(file)))
    if module.changes_functions:
        raise Uncertain(f"{Path(file).name}: changes functions, or what their names mean")
    set_elsewhere |= module.elsewhere
    return module.hides


@lru_cache(_FILES_KEPT)
def _codes(file: str, lines: tuple[str, ...]) -> dict[tuple[str, int], CodeType]:
    """The code of every function in a file, by name and first line."""
    found: dict[tuple[str, int], CodeType] = {}
    with suppress(SyntaxError, ValueError):
        stack = [compile("".join(lines), file, "exec", dont_inherit=True)]
        while stack:
            code = stack.pop()
            found[code.co_name, code.co_firstlineno] = code
            stack += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _same(one: CodeType, other: CodeType) -> bool:
    """True if both do the same, in whatever lines."""
    for field in ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount"):
        if getattr(one, field) != getattr(other, field):
            return False
    if one.co_exceptiontable != other.co_exceptiontable:
        return False
    if (one.co_kwonlyargcount, one.co_posonlyargcount) != (other.co_kwonlyargcount, other.co_posonlyargcount):
        return False
    if (one.co_flags ^ other.co_flags) & _KIND_FLAGS or len(one.co_consts) != len(other.co_consts):
        return False
    return all(map(_same_constant, one.co_consts, other.co_consts))


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    if isinstance(one, frozenset):
        return type(one) is type(other) and one == other
    return type(one) is type(other) and repr(one) == repr(other)


def _is_code(value: Any) -> bool:
    """True for what is called or asked for its names: its own name is all that could be bound anew."""
    return isinstance(value, ModuleType | type | Definition) or callable(value)


def is_constant(value: Any) -> bool:
    """True for data that nobody can change in place."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(is_constant, value))
    return value is None or type(value) in (bool, int, str, float, Fraction, Schedule, Collective)


@dataclass(frozen=True, slots=True, eq=False)
class _Bindings:
    """How often a module binds each of its names, a name that a function may bind counting twice; the names that it
    binds as attributes, perhaps of another module; whether it may bind some in ways that its source hides, and whether
    it may change functions."""

    bound: Counter[str]
    elsewhere: frozenset[str] = frozenset()
    hides: bool = True
    changes_functions: bool = False


@lru_cache(_FILES_KEPT)
def _bindings(lines: tuple[str, ...]) -> _Bindings:
    """What a module with these lines binds."""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return _Bindings(Counter())
    bound: Counter[str] = Counter()
    for node in _module_level(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                bound[name] += 1
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound[name] += 1
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound.update((each.asname or each.name).partition(".")[0] for each in names)
            case ast.ExceptHandler(name=str(name)):
                bound[name] += 2
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound[name] += 2
    hides = changes_functions = False
    elsewhere = frozenset(
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    )
    harmless = {
        id(argument.func)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "compiled"
        for argument in call.args
        if isinstance(argument, ast.Call)
    }  # `optcc.compiled` reads the globals that it is given
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            bound.update(dict.fromkeys(node.names, 2))
        if isinstance(node, ast.NamedExpr):
            bound[node.target.id] += 2
        hides |= isinstance(node, ast.Name) and node.id in _CHANGES_NAMES and id(node) not in harmless
        hides |= isinstance(node, ast.Attribute) and node.attr in _CHANGES_NAMES
        hides |= isinstance(node, ast.ImportFrom) and any(each.name in (*_CHANGES_NAMES, "*") for each in node.names)
        hides |= isinstance(node, ast.Name) and node.id == "getattr" and isinstance(node.ctx, ast.Load)
        changes_functions |= isinstance(node, ast.Attribute | ast.Constant) and _changes_functions(node)
        changes_functions |= isinstance(node, ast.Call) and _sets_by_force(node)
    return _Bindings(bound, elsewhere, hides, changes_functions)


def _changes_functions(node: ast.Attribute | ast.Constant) -> bool:
    return (node.attr if isinstance(node, ast.Attribute) else node.value) in _CHANGES_FUNCTIONS


def _sets_by_force(call: ast.Call) -> bool:
    """True for `object.__setattr__` of another object than the one whose method calls it."""
    is_set = isinstance(call.func, ast.Attribute) and call.func.attr in ("__setattr__", "__delattr__")
    return is_set and not (call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "self")


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes outside of functions, classes and comprehensions; a loop's twice, as it may bind anew."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.For | ast.While):
            yield from _module_level(child)
        inside = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        if not isinstance(child, inside | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from _module_level(child)
