"""Chunks become bytes.

before  0->1 s2 c0 reduce        after  0->1 reduce bytes 8192..12287
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from optcc.arrays import Lists, column
from optcc.collective import check_reduction_of
from optcc.schedule import DATA, Layout, Schedule
from optcc.transfers import Transfers


def bind(schedule: Schedule, size_bytes: int, dtype: str, reduction: str) -> Transfers:
    """The transfers of `schedule` for a message of `size_bytes`; chunks that came out empty are dropped.

    Scratch slot j of a section lies where the section lies, (j + 1) messages further on. No dependencies yet.

    Raises InputError for a size, type or reduction that cannot be.
    """
    check_reduction_of(reduction, dtype)
    layout = Layout.of(schedule.segments, size_bytes, dtype)
    sections = [len(each) for each in layout.first]
    base = np.concatenate(([0], np.cumsum(sections))).astype(np.int64)
    first = np.fromiter(chain.from_iterable(layout.first), np.int64) * layout.itemsize
    stop = np.fromiter(chain.from_iterable(layout.stop), np.int64) * layout.itemsize
    chunk = base[schedule.segment] + schedule.section if len(schedule) else np.zeros(0, dtype=np.int64)
    start, length = first[chunk], stop[chunk] - first[chunk]
    kept = np.flatnonzero(length > 0)
    empty = Lists.empty(len(kept))
    return Transfers(
        schedule.collective,
        reduction,
        dtype,
        size_bytes,
        schedule.scratch_slots * size_bytes,
        schedule.stages,
        src=column(schedule.src[kept]),
        dst=column(schedule.dst[kept]),
        op=column(schedule.op[kept]),
        src_offset=column((start + (schedule.src_slot - DATA) * size_bytes)[kept]),
        dst_offset=column((start + (schedule.dst_slot - DATA) * size_bytes)[kept]),
        bytes=column(length[kept]),
        segment=column(schedule.segment[kept]),
        stage=column(schedule.stage[kept]),
        line=column(schedule.line[kept]),
        after=empty,
        order=empty,
    )
