"""Inner loops written as plain functions over arrays: in plain Python for small inputs, compiled by numba for others.

The result is the same. Importing numba takes 0.2 s, loading the loops of a simulation from its cache 0.3 s, and
compiling them for the first time on a machine 10 s; a plan of a few hundred transfers takes 0.1 s in plain Python. So a
process starts in plain Python, and changes to compiled loops once it has spent about what they would have cost.
`python -m optcc.compile_kernels` fills the cache.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np

_ALLOCATES = {"copy", "empty", "full", "sort", "zeros"}
"""What a kernel that makes arrays, or has them sorted, calls."""

_SHORT = 3000
"""Bytes of code of a kernel that is put into those that call it."""


_ROW_S = 10e-6
"""What a row of an array is taken to cost a kernel in plain Python before it has run: it is 0.1 to 30 us."""


class Tier:
    """Decides which calls of kernels run in plain Python, by what those before have cost."""

    def __init__(self, loaded_s: float, compiled_s: float) -> None:
        self.loaded_s = loaded_s
        """How long kernels run in plain Python in all if numba's cache has them."""
        self.compiled_s = compiled_s
        """How long if it does not."""
        self._spent_s = 0.0
        self._row_s: dict[FunctionType, float] = {}

    def is_plain(self, kernel: FunctionType, rows: int) -> bool:
        """Whether a call of `kernel` with arrays of so many rows is to run in plain Python."""
        would_be_s = self._spent_s + rows * self._row_s.get(kernel, _ROW_S)
        return would_be_s <= self.loaded_s or (would_be_s <= self.compiled_s and not _is_cached(kernel))

    def run(self, kernel: FunctionType, rows: int, arguments: tuple[Any, ...]) -> Any:
        """Calls `kernel` in plain Python."""
        started_s = time.thread_time()
        result = _run_plain(kernel, arguments)
        took_s = time.thread_time() - started_s
        self._spent_s += took_s
        self._row_s[kernel] = took_s / max(1, rows)
        return result


T = TypeVar("T")
_IMPORTING = threading.RLock()


def once(make: Callable[[], T]) -> Callable[[], T]:
    """`make`, which imports numba, called once. One thread imports it at a time: another would see half of it."""
    made: list[T] = []

    def get() -> T:
        if not made:
            with _IMPORTING:
                if not made:
                    made.append(make())
        return made[0]

    return get


tier = Tier(loaded_s=0.4, compiled_s=3.0)


def compile_always() -> None:
    """From now on this process runs no kernel in plain Python: for measurements, and to fill numba's cache."""
    tier.loaded_s = tier.compiled_s = -1.0


def load_at_once() -> None:
    """From now on this process runs no kernel in plain Python that numba's cache has: loading them later would keep
    somebody waiting."""
    tier.loaded_s = -1.0


def row(table: Any, index: int) -> Any:
    """Row `index` of a table; the memoryviews that kernels get in plain Python lack `table[index]`."""
    return memoryview(np.asarray(table)[index])


def fetch(array: Any, row: int) -> None:
    """Row `row` of `array` is wanted soon: a compiled kernel asks the processor for it, plain Python does nothing.

    The row need not exist.
    """


def compiled(kernels: Sequence[Callable[..., Any]], namespace: dict[str, Any]) -> Any:
    """The functions `kernels` by their names without the leading underscore; each may call those before it.

    Each runs in plain Python until `tier` says otherwise. There arrays are memoryviews, so kernels index them item by
    item, get rows by `row`, and write `np.asarray` where they need NumPy's functions. `namespace` is the module's
    `globals()`. Keep the result (functools.cache), and look kernels up in it for every call: compiling replaces them.
    """
    made = SimpleNamespace()
    compiled_once = once(lambda: compiled_at_once(kernels, namespace))

    def tiered(kernel: FunctionType) -> Callable[..., Any]:
        name = _public(kernel)

        def call(*arguments: Any) -> Any:
            rows = _rows(arguments)
            if tier.is_plain(kernel, rows) or find_spec("numba") is None:
                return tier.run(kernel, rows, arguments)
            setattr(made, name, getattr(compiled_once(), name))
            return getattr(made, name)(*arguments)

        return call

    for kernel in kernels:
        assert isinstance(kernel, FunctionType)
        setattr(made, _public(kernel), tiered(kernel))
    return made


def _public(kernel: Callable[..., Any]) -> str:
    return kernel.__name__.removeprefix("_")


def _rows(arguments: tuple[Any, ...]) -> int:
    """The length of the longest array among `arguments`, those in tuples included."""
    longest = 0
    for each in arguments:
        if isinstance(each, np.ndarray):
            longest = max(longest, len(each))
        elif isinstance(each, tuple):
            longest = max(longest, _rows(each))
    return longest


def _run_plain(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls `kernel` on memoryviews: their items are Python's numbers, four times as fast as NumPy's."""
    result = kernel(*map(_view, arguments))
    return np.asarray(result) if isinstance(result, memoryview) else result


def _view(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.data if value.dtype.kind in "iufb" and value.dtype != np.float16 else value
    if isinstance(value, tuple):
        views = map(_view, value)
        return type(value)(*views) if hasattr(value, "_fields") else tuple(views)
    return value


@cache
def _is_cached(kernel: FunctionType) -> bool:
    """Whether numba's cache has `kernel`, perhaps of an older version of its file; does not import numba."""
    source = Path(kernel.__code__.co_filename)
    version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    name = f"{source.stem}.{kernel.__qualname__}-{kernel.__code__.co_firstlineno}.{version}.nbi"
    return any((folder / name).is_file() for folder in _cache_folders(source))


def _cache_folders(source: Path) -> Iterator[Path]:
    """Where numba keeps what it compiles: where it is told to, beside the source, or in the user's cache."""
    told = os.environ.get("NUMBA_CACHE_DIR")
    if told:
        yield from Path(told).glob("*")
        return
    yield source.parent / "__pycache__"
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "")) / ".cache"
    yield from (Path(cache_home) / "numba").glob("*")


def compiled_at_once(kernels: Sequence[Callable[..., Any]], namespace: dict[str, Any]) -> Any:
    """`compiled` without plain Python first; imports numba. Without numba the functions are as they are."""
    try:
        import numba
    except ImportError:
        return SimpleNamespace(**{_public(kernel): kernel for kernel in kernels})
    _teach_row()
    _teach_fetch()
    known = dict(namespace)
    for kernel in kernels:
        assert isinstance(kernel, FunctionType)
        # A copy that sees the compiled versions of those before it: numba resolves names in the function's globals.
        copy = FunctionType(kernel.__code__, known, kernel.__name__)
        copy.__module__ = kernel.__module__
        # Without memory of its own a kernel need not count references to the arrays that it is given, and two atomic
        # additions for each of them in each call are most of what a short one costs.
        options = {} if _ALLOCATES & set(kernel.__code__.co_names) else {"_nrt": False}
        if options and len(kernel.__code__.co_code) < _SHORT:  # else an array is passed on as seven numbers
            options["forceinline"] = True
        try:
            made = _skip_unreadable(numba.njit(copy, cache=True, **options))
        except RuntimeError:  # no place to write the cache to
            made = numba.njit(copy, **options)
        known[kernel.__name__] = _compile_once(made)
    return SimpleNamespace(**{_public(kernel): known[kernel.__name__] for kernel in kernels})


def _compile_once(kernel: Any) -> Any:
    """`kernel`, whose callers share one version for all integers.

    Left alone, numba compiles another for every constant that it is called with, the zero that a variable begins with
    included, and for 32 bits: most of them twice, and all that they call.
    """
    from numba import types

    if isinstance(kernel, FunctionType):  # NUMBA_DISABLE_JIT
        return kernel
    call_template = kernel.get_call_template

    def widened(kind: Any) -> Any:
        kind = types.unliteral(kind)
        return types.int64 if kind == types.int32 else kind

    def shared_template(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return call_template(tuple(map(widened, args)), {name: widened(kind) for name, kind in kws.items()})

    kernel.get_call_template = shared_template
    return kernel


def _skip_unreadable(kernel: Any) -> Any:
    """`kernel`, for which an unreadable cache entry counts as none.

    Entries name the types of arguments by module. Where another version has left some and a module is called otherwise
    since, numba raises instead of compiling.
    """
    if isinstance(kernel, FunctionType):  # NUMBA_DISABLE_JIT
        return kernel
    entries = kernel._cache
    load = entries.load_overload

    def load_overload(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except (ImportError, AttributeError):
            entries.flush()
            return None

    entries.load_overload = load_overload
    return kernel


@cache
def _teach_row() -> None:
    """Tells numba what `row` is: `table[index]`."""
    from numba.core import types, typing
    from numba.extending import lower_builtin, type_callable

    @type_callable(row)  # type: ignore[untyped-decorator]
    def row_type(context: Any) -> Any:
        return lambda table, index: context.resolve_function_type(getitem, (table, index), {}).return_type

    @lower_builtin(row, types.Array, types.Integer)  # type: ignore[untyped-decorator]
    def row_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = context.get_function(getitem, typing.signature(signature.return_type, *signature.args))
        return code(builder, arguments)


@cache
def _teach_fetch() -> None:
    """Tells numba what `fetch` is: the prefetch instruction, for writing."""
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import lower_builtin, type_callable

    @type_callable(fetch)  # type: ignore[untyped-decorator]
    def fetch_type(_: Any) -> Any:
        return lambda array, row: types.none

    @lower_builtin(fetch, types.Array, types.Integer)  # type: ignore[untyped-decorator]
    def fetch_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, row_type = signature.args
        array = context.make_array(array_type)(context, builder, arguments[0])
        row = context.cast(builder, arguments[1], row_type, types.intp)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        offset = builder.mul(row, cgutils.unpack_tuple(builder, array.strides)[0])
        address = builder.gep(builder.bitcast(array.data, byte), [offset])
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for_writing, keep, data = (ir.Constant(number, value) for value in (1, 3, 1))
        builder.call(instruction, [address, for_writing, keep, data])
        return context.get_dummy_value()
