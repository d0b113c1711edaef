"""Processes that are forked from a rank: they inherit its transports and engines, and have no part in the job.

A child has the same connections as the rank. As long as it keeps them open, the peers of a rank that has died hear
nothing of it, and what the child says on them is taken for the rank's. So in the child each transport closes its files
without a word (the rank's stay open), every use of it raises one error, and closing or aborting it does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from optcc.errors import RuntimeFault

FORKED = "this process was forked from a rank: that rank alone may use its transport"
_USES = (
    *("open", "open_over", "set_rates", "defer_reports", "post_send", "post_recv"),
    *("poll", "allgather", "barrier"),
)
_ENDS = ("abort", "close")
_HOOKS: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
T = TypeVar("T")


def call_in_child(owner: T, hook: Callable[[T], None]) -> None:
    """Calls `hook(owner)` in every process that is forked from this one while there is an `owner`."""
    _HOOKS[owner] = hook


def take_no_part(transport: Any) -> None:
    """In the child: no use of the transport any more, and nothing to end.

    The methods of the object are replaced, so that the rank itself has nothing to check in each call.
    """
    refuse_uses(transport, _USES)
    for name in _ENDS:
        setattr(transport, name, _do_nothing)


def refuse_uses(owner: Any, names: Iterable[str]) -> None:
    """In the child: the methods of these names raise RuntimeFault."""
    for name in names:
        setattr(owner, name, _refuse)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeFault(FORKED)


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _begin_child() -> None:
    for owner, hook in list(_HOOKS.items()):
        hook(owner)


os.register_at_fork(after_in_child=_begin_child)
