"""Memory that a process shares with whoever opens its file: nobody finds half a file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".new"
"""What the names of files end in that are not whole yet."""


@contextmanager
def new_shared_file(path: Path, n_bytes: int) -> Iterator[mmap.mmap]:
    """`n_bytes` of zeros in a new file of this user alone, which is at `path` once what is to be written first has
    been: at the end of the block. If that raises, there is none.

    Raises OSError if the file cannot be made, there is one at `path`, or no room for it.
    """
    descriptor, name = tempfile.mkstemp(UNFINISHED, ".", path.parent)
    try:
        # With no room left, a store into the file would end the process.
        os.posix_fallocate(descriptor, 0, n_bytes)
        yield mmap.mmap(descriptor, n_bytes)
        os.link(name, path)
    finally:
        os.close(descriptor)
        Path(name).unlink()
