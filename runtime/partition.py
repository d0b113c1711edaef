"""What becomes of a job one of whose hosts has lost its last rail: `fail`, the default, or `wait`.

    fail    the job ends in AllRailsFailed once no rail has reached the host for `stall_s` of the transport
    wait    collectives stand still until the host has a rail again, and then go on where they were; if it has none
            within `partition_s`, all ranks raise the AllRailsFailed of `fail`, within that time

Either is the same at every rank; ranks compare it when they meet. To the protocol, `wait` is the number `partition_s`
in its settings (`optcc.runtime.protocol.settings`), and `fail` is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Literal

from optcc.errors import InputError

PARTITION_VARIABLE, PARTITION_S_VARIABLE = "OPTCC_PARTITION", "OPTCC_PARTITION_S"
Partition = Literal["fail", "wait"]
PARTITION_S = 60.0
"""How long `wait` waits unless it is said."""
_POLICIES = ("fail", "wait")


def partition_s_of(environ: Mapping[str, str], partition: str | None = None, partition_s: float | None = None) -> float:
    """How long a host without a live rail is waited for, seconds; 0 for the policy `fail`.

    What is None is left to OPTCC_PARTITION and OPTCC_PARTITION_S; where those are not set, to `fail` and `PARTITION_S`.
    Raises InputError for another policy, a time that is not above 0, and a time without `wait`.

    >>> partition_s_of({}), partition_s_of({}, "wait"), partition_s_of({"OPTCC_PARTITION": "wait"}, partition_s=5.0)
    (0.0, 60.0, 5.0)
    >>> partition_s_of({"OPTCC_PARTITION": "wait", "OPTCC_PARTITION_S": "30"}), partition_s_of({}, "fail")
    (30.0, 0.0)
    """
    name = "partition" if partition is not None else PARTITION_VARIABLE
    policy = partition if partition is not None else environ.get(PARTITION_VARIABLE, "") or "fail"
    if policy not in _POLICIES:
        raise InputError(f"{name} {policy!r}: must be {' or '.join(_POLICIES)}")
    # A variable beside an argument that says `fail` is for other jobs of the same shell.
    text = environ.get(PARTITION_S_VARIABLE, "") if partition_s is None and partition != "fail" else ""
    if partition_s is not None:
        label, seconds = f"partition_s {partition_s}", float(partition_s)
    elif text:
        label, seconds = f"{PARTITION_S_VARIABLE} {text!r}", _number(text)
    else:
        return PARTITION_S if policy == "wait" else 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise InputError(f"{label}: must be a number of seconds above 0")
    if policy != "wait":
        with_it = f"{PARTITION_VARIABLE}=wait" if text else "partition='wait'"
        raise InputError(f"{label}: must come with {with_it}")
    return seconds


def _number(text: str) -> float:
    """A number of seconds; what is none of them is not finite."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
