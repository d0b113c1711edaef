"""The arrays of a bench at one rank: in the host's memory, or in a GPU's, where they are checked too."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from optcc.collective import Collective, Region
from optcc.errors import InputError
from optcc.runtime.cupy_kernels import load_cupy
from optcc.runtime.device_actions import DevicePlace
from optcc.runtime.device_paths import PATHS, STAGED, DevicePath, choose_path
from optcc.runtime.exact_inputs import expected_output, make_input
from optcc.runtime.transport import Transport

CPU, GPU = "cpu", "gpu"
_POISON = 0x7B


class BenchDevice(NamedTuple):
    """The GPU of a rank: where it is, what it is called, and which way messages take there, and why."""

    place: DevicePlace
    name: str
    path: str

    def __str__(self) -> str:
        return f"gpu:{self.place.device_id} {self.name}, {self.path}"


def check_device(text: str) -> str:
    """`text`, if it is cpu, gpu, or gpu:N; raises InputError.

    >>> check_device("gpu:1")
    'gpu:1'
    """
    kind, colon, number = text.partition(":")
    if kind not in (CPU, GPU) or (colon and (kind == CPU or not number.isdecimal())):
        raise InputError(f"--device {text!r}: must be cpu, gpu or gpu:N")
    return text


def device_of_rank(
    text: str, transport: Transport, hosts: Sequence[str], paths: Collection[str] = PATHS
) -> BenchDevice | None:
    """Where a rank's arrays are, by `--device`: None for the host's memory; collective, before there is an engine.

    `gpu` is one GPU after the other for the ranks of a host, again from the first if there are fewer; `gpu:N` is that
    one for all. `hosts` are the ranks' hosts, `paths` the ways that messages may take. Raises EnvironmentMissing
    without a GPU, InputError for one that is not there.
    """
    if text == CPU:
        return None
    rank = transport.rank
    number = _number(text, sum(host == hosts[rank] for host in hosts[:rank]))
    path = choose_path(transport, number, paths=paths)
    return BenchDevice(path.place(number), _name(number), str(path))


def devices_on_loopback(text: str, n_ranks: int) -> tuple[str, ...]:
    """What `device_of_rank` says for the ranks of one process, which stage; raises as it."""
    numbers = [_number(text, rank) for rank in range(n_ranks)]
    path = DevicePath(STAGED, "loopback is memory of this process")
    return tuple(str(BenchDevice(DevicePlace(number), _name(number), str(path))) for number in numbers)


def _number(text: str, local_rank: int) -> int:
    """The GPU of the `local_rank`-th rank of this host."""
    n_devices = int(load_cupy().cuda.runtime.getDeviceCount())
    number = int(text.partition(":")[2]) if ":" in text else local_rank % n_devices
    if number >= n_devices:
        raise InputError(f"--device {text}: must be below {n_devices}, the GPUs of this host")
    return number


def _name(number: int) -> str:
    return str(load_cupy().cuda.runtime.getDeviceProperties(number)["name"].decode())


@contextmanager
def on_device(device: BenchDevice | None) -> Iterator[None]:
    """The GPU is the current one, if there is one."""
    if device is None:
        yield
        return
    with load_cupy().cuda.Device(device.place.device_id):
        yield


class BenchMessage:
    """A rank's message, where in it are what the rank gives and what it gets, and what that must be.

    What is in several places of the message, as what a rank gets of an AllToAll, is put together: so the rank gives or
    gets it.
    """

    def __init__(
        self,
        collective: Collective,
        rank: int,
        count: int,
        dtype: str,
        reduction: str,
        check: bool,
        device: BenchDevice | None = None,
    ) -> None:
        given, got = collective.before(rank, count), collective.after(rank, count)
        is_whole = _is_contiguous(given) and _is_contiguous(got)
        self._given, self._got = (_span if is_whole else _length)(given), (_span if is_whole else _length)(got)
        self._source: Any = make_input(rank, count, dtype, reduction)
        expected = expected_output(collective, count, dtype, reduction, rank)[0] if check else None
        if not is_whole:
            self._source = _joined(self._source, given)
            expected = None if expected is None else _joined(expected, got)
        longest = max((each.stop for each in (self._given, self._got) if each is not None), default=0)
        self._target: Any = np.zeros(count if is_whole else longest, self._source.dtype)
        self._wanted = None if expected is None or self._got is None else expected[self._got]
        self._cupy = None if device is None else load_cupy()
        if self._cupy is not None:
            self._source, self._target = self._cupy.asarray(self._source), self._cupy.asarray(self._target)
            self._wanted = None if self._wanted is None else self._cupy.asarray(self._wanted)

    def arrays(self, mode: str) -> tuple[Any, Any]:
        """What the rank gives and gets, made ready for a run."""
        given, got, target = self._given, self._got, self._target
        target.view(np.uint8).fill(_POISON)
        if mode == "in" and given is not None:
            target[given] = self._source[given]
        send = None if given is None else (target if mode == "in" else self._source)[given]
        return send, None if got is None else target[got]

    def wrong(self) -> int:
        """Wrong elements after a run; 0 if nothing is to be checked."""
        if self._wanted is None or self._got is None:
            return 0
        # Where the arrays are.
        package = self._cupy or np
        return int(package.count_nonzero(self._target[self._got] != self._wanted))

    def settle(self) -> None:
        """Waits until what is queued on a GPU is done."""
        if self._cupy is not None:
            self._cupy.cuda.get_current_stream().synchronize()


def _is_contiguous(regions: Sequence[Region]) -> bool:
    """True if the regions are one after the other, without anything between them."""
    return all(before[1] == after[0] for before, after in pairwise(regions))


def _joined(elements: Any, regions: Sequence[Region]) -> Any:
    """Those of the regions, one after the other."""
    return np.concatenate([elements[:0], *(elements[start:stop] for start, stop, _ in regions)])


def _length(regions: Sequence[Region]) -> slice | None:
    """As many elements as the regions have, from 0 on; None for no region."""
    return slice(0, sum(stop - start for start, stop, _ in regions)) if regions else None


def _span(regions: Sequence[Region]) -> slice | None:
    """The elements of adjacent regions; None for no region."""
    return slice(regions[0][0], regions[-1][1]) if regions else None
