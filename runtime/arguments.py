"""What a call of a collective asks for: a plan, the arrays that it runs on, and what it returns.

Arrays are NumPy's, CuPy's, or any that offers the array API's exchange (`__dlpack__`: torch, JAX, ...), whose memory is
used where it is. What is made for the caller is of the same kind as what came. Scalars, lists and strings are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from operator import index
from typing import Any, NamedTuple

import numpy as np

from optcc.collective import Collective, Region, split
from optcc.errors import InputError
from optcc.plan import PlanRequest
from optcc.runtime.cupy_kernels import load_cupy

_CPU, _CUDA = 1, 2
"""DLPack's numbers of devices."""


class Call(NamedTuple):
    """A plan for `request` runs from `send` to `recv`; either is None where this rank has nothing to give, or to get.

    `result` is what the caller gets, `given` the array that came first, as it came.
    """

    request: PlanRequest
    send: Any
    recv: Any
    result: Any
    given: Any = None

    @property
    def example(self) -> Any:
        """An array that lies where all of them lie."""
        return self.recv if self.send is None else self.send


def all_reduce(n_ranks: int, array: Any, op: str, out: Any, dtype: str | None) -> Call:
    """See `Communicator.all_reduce`."""
    send = as_array("array", array)
    request = PlanRequest(Collective("allreduce", n_ranks), send.nbytes, dtype_of(send, dtype), op)
    return Call(request, send, *_output(out, array, send, send.shape), array)


def reduce_scatter(n_ranks: int, rank: int, array: Any, op: str, out: Any, dtype: str | None) -> Call:
    """See `Communicator.reduce_scatter`."""
    send = as_array("array", array)
    request = PlanRequest(Collective("reducescatter", n_ranks), send.nbytes, dtype_of(send, dtype), op)
    first, stop = list(split(send.size, n_ranks))[rank]
    return Call(request, send, *_output(out, array, send, (stop - first,)), array)


def all_gather(n_ranks: int, array: Any, out: Any, dtype: str | None) -> Call:
    """See `Communicator.all_gather`."""
    send = as_array("array", array)
    request = PlanRequest(Collective("allgather", n_ranks), send.nbytes * n_ranks, dtype_of(send, dtype), "sum")
    return Call(request, send, *_output(out, array, send, (n_ranks, *send.shape)), array)


def broadcast(n_ranks: int, rank: int, array: Any, root: int, dtype: str | None) -> Call:
    """See `Communicator.broadcast`."""
    root = as_int("root", root)
    recv = as_array("array", array)
    request = PlanRequest(Collective("broadcast", n_ranks, root), recv.nbytes, dtype_of(recv, dtype), "sum")
    return Call(request, recv if rank == root else None, recv, array, array)


def reduce(n_ranks: int, rank: int, array: Any, op: str, root: int, out: Any, dtype: str | None) -> Call:
    """See `Communicator.reduce`."""
    root = as_int("root", root)
    send = as_array("array", array)
    request = PlanRequest(Collective("reduce", n_ranks, root), send.nbytes, dtype_of(send, dtype), op)
    recv, result = _output(out, array, send, send.shape) if rank == root else (None, None)
    return Call(request, send, recv, result, array)


def all_to_all(n_ranks: int, array: Any, out: Any, dtype: str | None) -> Call:
    """See `Communicator.all_to_all`."""
    send = as_array("array", array)
    _check_blocks(send, n_ranks)
    request = PlanRequest(Collective("alltoall", n_ranks), send.nbytes * n_ranks, dtype_of(send, dtype), "sum")
    return Call(request, send, *_output(out, array, send, send.shape), array)


def all_to_all_v(rank: int, counts: Sequence[Sequence[int]], array: Any, out: Any, dtype: str | None) -> Call:
    """See `Communicator.all_to_all_v`; `counts[s][d]` is how many elements rank s has for rank d."""
    send = as_array("array", array)
    if sum(counts[rank]) != send.size:
        raise InputError(f"counts {list(counts[rank])}: must add up to {send.size}, the elements of the array")
    total = sum(map(sum, counts))
    # Nothing at all is an AllToAll of empty blocks.
    collective = Collective.all_to_all_v(counts) if total else Collective("alltoall", len(counts))
    request = PlanRequest(collective, total * send.itemsize, dtype_of(send, dtype), "sum")
    return Call(request, send, *_output(out, array, send, (sum(row[rank] for row in counts),)), array)


def gather(n_ranks: int, rank: int, array: Any, root: int, out: Any, dtype: str | None) -> Call:
    """See `Communicator.gather`."""
    root = as_int("root", root)
    send = as_array("array", array)
    request = PlanRequest(Collective("gather", n_ranks, root), send.nbytes * n_ranks, dtype_of(send, dtype), "sum")
    shape = n_ranks, *send.shape
    recv, result = _output(out, array, send, shape) if rank == root else (None, None)
    return Call(request, send, recv, result, array)


def scatter(n_ranks: int, rank: int, array: Any, root: int, out: Any, dtype: str | None) -> Call:
    """See `Communicator.scatter`."""
    root = as_int("root", root)
    collective = Collective("scatter", n_ranks, root)
    if rank != root:
        recv = as_array("out", out)
        return Call(PlanRequest(collective, recv.nbytes * n_ranks, dtype_of(recv, dtype), "sum"), None, recv, out, out)
    send = as_array("array", array)
    _check_blocks(send, n_ranks)
    shape = send.shape[1:] if send.shape[:1] == (n_ranks,) else (send.size // n_ranks,)
    request = PlanRequest(collective, send.nbytes, dtype_of(send, dtype), "sum")
    return Call(request, send, *_output(out, array, send, shape), array)


def perform(rank: int, collective: Collective, array: Any, op: str, out: Any, dtype: str | None) -> Call:
    """See `Communicator.perform`."""
    if not isinstance(collective, Collective):
        raise InputError(f"collective: {type(collective).__name__}: must be a Collective, such as Collective.declared")
    share = sum((cell.share for cell in collective.cells if rank in cell.before), Fraction(0))
    send = None if array is None else as_array("array", array)
    own, part, name = send, share, "array"
    if not share:
        # What this rank gets says how long the message is.
        own, name = as_array("out", out), "out"
        part = sum((cell.share for cell in collective.cells for taker, _ in cell.after if taker == rank), Fraction(0))
    if own is None or not part:
        raise InputError(f"{name}: rank {rank} of {collective.name}: must give or get something of the message")
    count = own.size / part
    if count.denominator != 1 or (share and _elements(collective.before(rank, int(count))) != own.size):
        raise InputError(f"{name}: {own.size} elements: must be {part} of a whole message of {collective.name}")
    request = PlanRequest(collective, int(count) * own.itemsize, dtype_of(own, dtype), op)
    length = _elements(collective.after(rank, int(count)))
    recv, result = (None, None) if not length else _output(out, own if array is None else array, own, (length,))
    return Call(request, send if share else None, recv, result, array if share else out)


def message(name: str, given: Any, *, is_output: bool = False) -> Any:
    """The bytes of an array that is sent or received as it is, where they are.

    Raises InputError for what is no array, not contiguous, or must be written and cannot.
    """
    array = as_array(name, given)
    if not array.flags.c_contiguous or (is_output and not getattr(array.flags, "writeable", True)):
        raise InputError(f"{name}: must be contiguous (C order){' and writable' if is_output else ''}")
    return array.reshape(-1).view(np.uint8)


def _elements(regions: Sequence[Region]) -> int:
    return sum(stop - start for start, stop, _ in regions)


def _check_blocks(send: Any, n_ranks: int) -> None:
    if send.size % n_ranks:
        raise InputError(f"array: {send.size} elements: must be a multiple of {n_ranks}, a block for each rank")


def as_int(name: str, given: Any) -> int:
    """`given`, the argument called `name`, as an int: of Python or NumPy, or whatever else Python takes as an index.

    >>> as_int("root", np.int64(3))
    3
    >>> as_int("root", 1.0)
    Traceback (most recent call last):
        ...
    optcc.errors.InputError: root 1.0: must be an integer, not float
    """
    try:
        return index(given)
    except TypeError:
        raise InputError(f"{name} {given!r}: must be an integer, not {type(given).__name__}") from None


def as_array(name: str, given: Any) -> Any:
    """`given`, the argument called `name`, as an array of NumPy or CuPy over the same memory.

    >>> as_array("array", 3.5)
    Traceback (most recent call last):
        ...
    optcc.errors.InputError: array: float: must be an array of NumPy or CuPy, or one with __dlpack__

    Raises InputError for what is no array, or whose memory cannot be used where it is.
    """
    if type(given) is np.ndarray or isinstance(given, (np.ndarray, _cupy_array())):
        return given
    is_on_gpu = hasattr(given, "__cuda_array_interface__")
    if not (hasattr(given, "__dlpack__") or is_on_gpu) or isinstance(given, np.generic):
        kind = type(given).__name__
        raise InputError(f"{name}: {kind}: must be an array of NumPy or CuPy, or one with __dlpack__")
    try:
        return _imported(given) if hasattr(given, "__dlpack__") else load_cupy().asarray(given)
    except (BufferError, RuntimeError, TypeError, ValueError, ImportError) as error:
        raise InputError(f"{name}: {type(given).__name__}: cannot be used where it is: {error}") from error


def _cupy_array() -> Any:
    """CuPy's array, if somebody has imported CuPy: else nothing is one."""
    return getattr(sys.modules.get("cupy"), "ndarray", ())


def _imported(given: Any) -> Any:
    """The memory of an array of another package. The exchange has CuPy's current stream wait for that of the array."""
    device, number = map(int, given.__dlpack_device__())
    if device == _CUDA:
        cupy = load_cupy()
        with cupy.cuda.Device(number):
            return cupy.from_dlpack(given)
    if device != _CPU:
        raise BufferError(f"it is on device {device} of DLPack: must be on a processor ({_CPU}) or CUDA ({_CUDA})")
    view = np.from_dlpack(given)
    if not view.flags.writeable and hasattr(given, "__array__"):
        # Old forms of the exchange cannot say that memory may be written; what the package itself gives NumPy does.
        own = np.asarray(given)
        if own.flags.writeable and own.dtype == view.dtype and own.ctypes.data == view.ctypes.data:
            return own
    return view


def stream_of(given: Any, array: Any) -> Any:
    """The stream on which the caller works with `given`, whose memory is `array`: torch's current one, for its tensors,
    CuPy's for all else; None in the host's memory."""
    if isinstance(array, np.ndarray):
        return None
    cupy, number = load_cupy(), int(array.device.id)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        pointer = int(torch.cuda.current_stream(number).cuda_stream)
        # Torch's default stream is the legacy one of CUDA, whose address is 0.
        return _foreign_stream(cupy, pointer, number) if pointer else cupy.cuda.Stream.null
    return cupy.cuda.get_current_stream(number)


class _StreamOfOthers(NamedTuple):
    """Says where a stream is by CUDA's protocol for streams."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _foreign_stream(cupy: Any, pointer: int, number: int) -> Any:
    """The stream of another package, as one of CuPy's."""
    take = getattr(cupy.cuda.Stream, "from_external", None)
    if take is None:
        return cupy.cuda.ExternalStream(pointer, number)
    # Since CuPy 14, which warns of the other way; the stream is of the current device.
    with cupy.cuda.Device(number):
        return take(_StreamOfOthers(pointer))


def dtype_of(array: Any, dtype: str | None) -> str:
    """The type of the elements, unless the caller has said it."""
    return str(array.dtype.name) if dtype is None else dtype


def _output(out: Any, given: Any, send: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Where the result goes, and the same as the caller gets it: a new array like `given` unless there is `out`."""
    if out is not None:
        return as_array("out", out), out
    if isinstance(send, np.ndarray):
        made = np.empty_like(send, shape=shape, order="C")
    else:
        with send.device:
            made = load_cupy().empty(shape, send.dtype)
    return made, made if given is send else _like(given, made)


def _like(given: Any, made: Any) -> Any:
    """`made` as an array of the package that `given` is from; as it is, if that takes none."""
    namespace = getattr(given, "__array_namespace__", None)
    package = sys.modules.get(type(given).__module__.partition(".")[0]) if namespace is None else namespace()
    take = getattr(package, "from_dlpack", None)
    return made if take is None else take(made)
