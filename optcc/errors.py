"""What can go wrong, as one tree.

    OptccError                 a caller's mistake or a failed run; the message says value, place and rule
    ├── InputError             a flag, a size, a rate, a file that does not say what it must
    ├── TopologyError          a cluster that cannot exist, or that a schedule does not accept
    ├── ScheduleError          a line of a schedule that cannot mean anything
    ├── PlanError              a plan that is not one: lanes, channels or bytes that do not fit
    │   ├── PlanRefuted        a plan that is to run, and was refuted
    │   └── PlanUnproved       a plan that is to run, and was not proved
    ├── CodecError             a file that is not what it says it is; names the path to the field
    ├── EnvironmentMissing     a right, a program or a package that this machine lacks
    ├── SolverError            a solver failed or lied
    │   └── SolverUnknown      a solver gave up: neither proved nor refuted
    └── RuntimeFault           a run that started and could not finish
        ├── MismatchError      the ranks do not agree on what they are about to run
        ├── RankLost           a rank is gone
        ├── AllRailsFailed     a server has no NIC left
        ├── DeadlineExceeded   the run took longer than it was given
        └── Cancelled          somebody gave the run up

A refuted schedule is a value (`optcc.verdict.Verdict` with a counterexample), not an exception.
Our own mistakes are asserts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import ClassVar

EXIT_DONE = 0
EXIT_REFUTED = 1
EXIT_BAD_INPUT = 2
EXIT_UNKNOWN = 3
EXIT_INTERRUPTED = 130


class OptccError(Exception):
    """Base of everything that optcc raises on purpose; `exit_code` is what a command returns for it."""

    exit_code: ClassVar[int] = EXIT_BAD_INPUT


class InputError(OptccError):
    """A value from the user that breaks a rule."""


class ArgumentError(InputError):
    """An argument that breaks a rule; the message starts with its name, which is that of the command line's option."""


class TopologyError(OptccError):
    """A topology that cannot be, or that a schedule does not accept."""


class ScheduleError(OptccError):
    """A schedule that cannot mean anything; raised at the line that makes the mistake."""


class PlanError(OptccError):
    """A plan whose parts do not fit together."""


class PlanRefuted(PlanError):
    """A plan that was refuted, and so does not run; the message has the counterexample."""

    exit_code = EXIT_REFUTED


class PlanUnproved(PlanError):
    """A plan of which it is unknown whether it is right, and so does not run."""

    exit_code = EXIT_UNKNOWN


class CodecError(OptccError):
    """A file that does not follow its format; the message starts with the path to the field."""


class EnvironmentMissing(OptccError):
    """A right, program or package that this machine lacks; the message says how to get it."""


class SolverError(OptccError):
    """A solver failed, or returned something that its certificate does not support."""

    exit_code = EXIT_REFUTED


class SolverUnknown(SolverError):
    """A solver gave up: the question stays open."""

    exit_code = EXIT_UNKNOWN


class RuntimeFault(OptccError):
    """A collective that started and could not finish.

    `culprits` are the ranks at fault, `nics` the NICs that have failed, as (rank, name): the same at every rank, as far
    as the transport knows them.
    """

    exit_code = EXIT_REFUTED

    def __init__(
        self, message: str = "", *, culprits: Sequence[int] = (), nics: Sequence[tuple[int, str]] = ()
    ) -> None:
        super().__init__(message)
        self.culprits, self.nics = tuple(culprits), tuple(nics)


class MismatchError(RuntimeFault):
    """The ranks disagree on the plan, the size, the type or the operation; raised at every rank."""


class RankLost(RuntimeFault):
    """A rank stopped answering."""


class AllRailsFailed(RuntimeFault):
    """A server has no NIC left."""


class DeadlineExceeded(RuntimeFault):
    """The deadline passed before the collective was done."""


class Cancelled(RuntimeFault):
    """The program gave up a run that was under way."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """What to add to a message that says which names there are, if one of them is much like the wrong one.

    >>> did_you_mean("rign", ["ring", "optcc"]), did_you_mean("nccl", ["ring", "optcc"])
    ('; did you mean ring?', '')
    """
    found = get_close_matches(str(wrong), list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def must_be_one_of(wrong: str, known: Iterable[str]) -> str:
    """The rule that a name breaks which is none of these.

    >>> must_be_one_of("summ", ["sum", "max"])
    'must be one of sum, max; did you mean sum?'
    """
    names = list(known)
    return f"must be one of {', '.join(names)}{did_you_mean(wrong, names)}"
