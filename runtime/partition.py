"""What becomes of a job one of whose hosts has lost its last rail: `fail`, the default, `wait`, or `without`.

    fail     the job ends in AllRailsFailed once no rail has reached the host for `stall_s` of the transport
    wait     collectives stand still until the host has a rail again, and then go on where they were; if it has none
             within `partition_s`, all ranks raise the AllRailsFailed of `fail`, within that time
    without  the others go on without the host, if they are on more than half of all hosts, once no rail has reached it
             for `stall_s`; they may merge what it has when it is back, for which either waits `partition_s`
             (`optcc.runtime.surviving`)

It is the same at every rank; ranks compare it when they meet. To the protocol, `wait` is the number `partition_s` in
its settings (`optcc.runtime.protocol.settings`), which is 0 for `fail`, and for `without` but in the lobby.

A program must know that results may lack contributions: so `without` is an argument, and never a variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Literal

from optcc.errors import InputError

PARTITION_VARIABLE, PARTITION_S_VARIABLE = "OPTCC_PARTITION", "OPTCC_PARTITION_S"
Partition = Literal["fail", "wait", "without"]
PARTITION_S = 60.0
"""How long `wait` waits, and `without` for a merge, unless it is said."""


def partition_s_of(environ: Mapping[str, str], partition: str | None = None, partition_s: float | None = None) -> float:
    """How long a host without a live rail is waited for, seconds; 0 for the policy `fail`. With `without`, by a merge.

    What is None is left to OPTCC_PARTITION and OPTCC_PARTITION_S; where those are not set, to `fail` and `PARTITION_S`.
    Raises InputError for another policy, the variable's being `without`, a time that is not above 0, and a time with
    `fail`.

    >>> partition_s_of({}), partition_s_of({}, "wait"), partition_s_of({"OPTCC_PARTITION": "wait"}, partition_s=5.0)
    (0.0, 60.0, 5.0)
    >>> partition_s_of({"OPTCC_PARTITION": "wait", "OPTCC_PARTITION_S": "30"}), partition_s_of({}, "fail")
    (30.0, 0.0)
    """
    name = "partition" if partition is not None else PARTITION_VARIABLE
    policy = partition if partition is not None else environ.get(PARTITION_VARIABLE, "") or "fail"
    if policy not in ("fail", "wait") and partition != "without":
        known = "fail or wait" if partition is None else "fail, wait or without"
        raise InputError(f"{name} {policy!r}: must be {known}")
    # A variable beside an argument that says `fail` is for other jobs of the same shell.
    text = environ.get(PARTITION_S_VARIABLE, "") if partition_s is None and partition != "fail" else ""
    if partition_s is not None:
        label, seconds = f"partition_s {partition_s}", float(partition_s)
    elif text:
        label, seconds = f"{PARTITION_S_VARIABLE} {text!r}", _number(text)
    else:
        return 0.0 if policy == "fail" else PARTITION_S
    if not (isfinite(seconds) and seconds > 0):
        raise InputError(f"{label}: must be a number of seconds above 0")
    if policy == "fail":
        with_it = f"{PARTITION_VARIABLE}=wait" if text else "partition='wait' or 'without'"
        raise InputError(f"{label}: must come with {with_it}")
    return seconds


def _number(text: str) -> float:
    """A number of seconds; what is none of them is not finite."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
