"""Inner loops written as plain functions over arrays: numba compiles them on first use, and without numba they run as
they are, slower and with the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

_ALLOCATES = {"copy", "empty", "full", "sort", "zeros"}
"""What a kernel that makes arrays, or has them sorted, calls."""

_SHORT = 3000
"""Bytes of code of a kernel that is put into those that call it."""


def fetch(array: Any, row: int) -> None:
    """Row `row` of `array` is wanted soon: a compiled kernel asks the processor for it, plain Python does nothing.

    The row need not exist.
    """


def compiled(kernels: Sequence[Callable[..., Any]], namespace: dict[str, Any]) -> Any:
    """The functions `kernels` by their names without the leading underscore; each may call those before it.

    `namespace` is the module's `globals()`. Keep the result (functools.cache): the first call imports numba.
    """
    try:
        import numba
    except ImportError:
        return SimpleNamespace(**{kernel.__name__.removeprefix("_"): kernel for kernel in kernels})
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
            made = numba.njit(copy, cache=True, **options)
        except RuntimeError:  # no place to write the cache to
            made = numba.njit(copy, **options)
        known[kernel.__name__] = _compile_once(made)
    return SimpleNamespace(**{kernel.__name__.removeprefix("_"): known[kernel.__name__] for kernel in kernels})


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
