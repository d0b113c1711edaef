"""Where records go: `sink_for` names a file's sink by its suffix; a sink is any object with `put` and `close`.

    .parquet            Apache Parquet, a row for each record         pyarrow, the extra `arrow`
    .arrow, .arrows     Arrow IPC, as a file or as a stream           pyarrow; a stream that breaks off can be read
    .npz                NumPy: a column for each field; several files, NAME.npz, NAME.2.npz, ..., if it is much

`read_records` reads any of them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from optcc.errors import CodecError, EnvironmentMissing, InputError
from optcc.runtime.taps.condense import NonFinite, Norms
from optcc.runtime.taps.policy import GUARD, NORMS
from optcc.runtime.taps.records import ChunkRecord

_COLUMNS = tuple(each.name for each in fields(ChunkRecord))
_TEXTS = ("job", "collective", "plan_name", "digest", "dtype", "reduction", "stage", "point", "what")
_PART_BYTES = 256 << 20
ARROW_SUFFIXES = (".parquet", ".arrow", ".arrows")


class Sink(Protocol):
    """What takes records. `put` may raise: the drain then ends, and the records stay in their ring."""

    def put(self, records: Sequence[ChunkRecord]) -> None:
        """Takes some records; returns once they are the sink's."""
        ...

    def close(self) -> None:
        """No more come."""
        ...


class CallbackSink:
    """Calls a function with the records."""

    def __init__(self, function: Callable[[Sequence[ChunkRecord]], Any]) -> None:
        self._function = function

    def put(self, records: Sequence[ChunkRecord]) -> None:
        self._function(records)

    def close(self) -> None:
        pass


class NpzSink:
    """Columns of NumPy arrays; the bytes of all records are one array, `data`, cut at `offsets`."""

    def __init__(self, path: Path) -> None:
        self._path, self._n_parts = path, 0
        self._kept: list[ChunkRecord] = []
        self._n_bytes = 0

    def put(self, records: Sequence[ChunkRecord]) -> None:
        self._kept += records
        self._n_bytes += sum(len(each.data) for each in records)
        if self._n_bytes >= _PART_BYTES:
            self._write()

    def close(self) -> None:
        if self._kept or not self._n_parts:
            self._write()

    def _write(self) -> None:
        self._n_parts += 1
        path = self._path if self._n_parts == 1 else self._path.with_suffix(f".{self._n_parts}.npz")
        kept = self._kept
        columns: dict[str, Any] = {}
        for name in _COLUMNS:
            if name != "data":
                kind = np.str_ if name in _TEXTS else np.float64 if name == "at_s" else np.int64
                columns[name] = np.array([getattr(each, name) for each in kept], dtype=kind)
        columns["offsets"] = np.cumsum([0, *(len(each.data) for each in kept)], dtype=np.int64)
        columns["data"] = np.frombuffer(b"".join(each.data for each in kept), dtype=np.uint8)
        try:
            np.savez(path, allow_pickle=False, **columns)
        except OSError as error:
            raise InputError(f"file {str(path)!r}: cannot be written: {error.strerror or error}") from None
        self._kept, self._n_bytes = [], 0


class ArrowSink:
    """Parquet or Arrow IPC, by the suffix. Beside the fields of `ChunkRecord` a row has `l2`, `least`, `largest`,
    `n_nan` and `n_inf`, where norms or the guard were taken.

    Raises EnvironmentMissing without pyarrow, InputError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._arrow = arrow = _import_arrow()
        whole, number = arrow.int64(), arrow.float64()
        kinds = {name: arrow.string() for name in _TEXTS} | {"at_s": number, "data": arrow.binary()}
        columns = [(name, kinds.get(name, whole)) for name in _COLUMNS]
        columns += [("l2", number), ("least", number), ("largest", number), ("n_nan", whole), ("n_inf", whole)]
        self._schema = arrow.schema(columns)
        try:
            if path.suffix == ".parquet":
                import pyarrow.parquet as parquet

                self._writer: Any = parquet.ParquetWriter(path, self._schema)
                self._file: Any = None
            else:
                self._file = arrow.OSFile(str(path), "wb")
                make = arrow.ipc.new_file if path.suffix == ".arrow" else arrow.ipc.new_stream
                self._writer = make(self._file, self._schema)
        except OSError as error:
            raise InputError(f"file {str(path)!r}: cannot be written: {error.strerror or error}") from None

    def put(self, records: Sequence[ChunkRecord]) -> None:
        columns: list[list[Any]] = [[getattr(each, name) for each in records] for name in _COLUMNS]
        rows = [_numbers(each) for each in records]
        columns += [[row[index] for row in rows] for index in range(5)]
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()
        if self._file is not None:
            self._file.close()


def _numbers(record: ChunkRecord) -> tuple[Any, ...]:
    value = record.value if record.what in (NORMS, GUARD) else None
    if isinstance(value, Norms):
        return value.square_sum**0.5, value.least, value.largest, value.n_nan, value.n_inf
    if isinstance(value, NonFinite):
        return None, None, None, value.n_nan, value.n_inf
    return None, None, None, None, None


def sink_for(path: Path) -> Sink:
    """The sink that writes a file; raises InputError for another suffix, and as the sinks."""
    if path.suffix == ".npz":
        return NpzSink(path)
    if path.suffix in ARROW_SUFFIXES:
        return ArrowSink(path)
    raise InputError(f"file {str(path)!r}: must end in .npz, {', '.join(ARROW_SUFFIXES)}")


def read_records(path: Path) -> list[ChunkRecord]:
    """The records in a file of one of these sinks. Raises CodecError, naming the file, if it is none, InputError if it
    cannot be read or its suffix is another, EnvironmentMissing without pyarrow."""
    try:
        if path.suffix == ".npz":
            return _read_npz(path)
        if path.suffix in ARROW_SUFFIXES:
            return _read_arrow(path)
    except FileNotFoundError:
        raise InputError(f"file {str(path)!r}: cannot be read: there is none") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CodecError(f"file {str(path)!r}: {error}: must be a file of records") from None
    raise InputError(f"file {str(path)!r}: must end in .npz, {', '.join(ARROW_SUFFIXES)}")


def _read_npz(path: Path) -> list[ChunkRecord]:
    with np.load(path, allow_pickle=False) as file:
        columns = {name: file[name].tolist() for name in _COLUMNS if name != "data"}
        data, offsets = file["data"].tobytes(), file["offsets"].tolist()
    columns["data"] = [data[start:stop] for start, stop in pairwise(offsets)]
    return [ChunkRecord(*row) for row in zip(*(columns[name] for name in _COLUMNS), strict=True)]


def _read_arrow(path: Path) -> list[ChunkRecord]:
    arrow = _import_arrow()
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        table = parquet.read_table(path)
    else:
        with arrow.OSFile(str(path), "rb") as file:
            opened = arrow.ipc.open_file(file) if path.suffix == ".arrow" else arrow.ipc.open_stream(file)
            table = opened.read_all()
    columns = [table.column(name).to_pylist() for name in _COLUMNS]
    return [ChunkRecord(*row) for row in zip(*columns, strict=True)]


def _import_arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise EnvironmentMissing("pyarrow is missing: pip install 'optcc[arrow]', or write .npz") from None
    return pyarrow
