"""`Work`: an operation that was begun, as torch.distributed knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError, distributed_c10d

from optcc.errors import DeadlineExceeded

# What follows a future may begin other operations and wait for them: each has a thread as soon as none is idle.
_CALLBACKS = ThreadPoolExecutor(max_workers=64, thread_name_prefix="optcc future")


class Work(distributed_c10d.Work):  # type: ignore[misc] # torch is Any
    """Done, or failed, once `end` is called, by the thread of its group; `outcome` is the value of its future."""

    def __init__(self, outcome: Any, what: str) -> None:
        super().__init__()
        self._outcome, self._what = outcome, what
        self._is_over = threading.Event()
        self._error: Exception | None = None
        self._future: Any = None
        self._lock = threading.Lock()
        # Who sent what was received, once that is known.
        self.source: Callable[[], int] = lambda: -1

    def end(self, error: BaseException | None) -> None:
        """It is done, or has failed with `error`."""
        if error is not None:
            # Programs look for these words, as Gloo says them.
            name = "Timed out" if isinstance(error, DeadlineExceeded) else type(error).__name__
            failure = DistBackendError(f"optcc {self._what}: {name} - {error}")
            failure.__cause__ = error
            self._error = failure
        self._is_over.set()
        with self._lock:
            future = self._future
        if future is not None:
            _CALLBACKS.submit(self._settle, future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True once it is done; raises DistBackendError if it has failed, or is not done within `timeout`."""
        limit_s = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not self._is_over.wait(limit_s):
            raise DistBackendError(f"optcc {self._what}: Timed out waiting {limit_s} s; it goes on")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is done or has failed."""
        return self._is_over.is_set()

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._is_over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Why it has failed."""
        return self._error

    def synchronize(self) -> None:
        """`wait`: there is no stream to make wait."""
        self.wait()

    def result(self) -> Any:
        """The tensors that it fills."""
        return self._outcome

    def source_rank(self) -> int:
        """The rank of the group whose message was received, -1 for what is no message."""
        return self.source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the tensors that it fills; what follows it runs on a thread of its own."""
        with self._lock:
            is_new = self._future is None
            if is_new:
                self._future = torch.futures.Future()
            is_over = self._is_over.is_set()
        if is_new and is_over:
            self._settle(self._future)
        return self._future

    def _settle(self, future: Any) -> None:
        # Both the thread of the group and whoever asked for the future may find that it is to be set.
        with self._lock:
            if future.done():
                return
            # Callbacks run within: another operation's, or this one's own `wait`, must not need the lock.
            set_to = future.set_result if self._error is None else future.set_exception
        set_to(self._outcome if self._error is None else self._error)


class JointWork(distributed_c10d.Work):  # type: ignore[misc] # torch is Any
    """Several operations that were begun together."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True once all are done; raises as `Work.wait`."""
        for each in self._works:
            each.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are done or have failed."""
        return all(each.is_completed() for each in self._works)

    def get_future(self) -> Any:
        """A future of the tensors that all of them fill."""
        return torch.futures.collect_all([each.get_future() for each in self._works])
