"""The numbers of ranks that a schedule is for: `@schedule(domain=powers_of_two())`.

A schedule of another number of ranks is refused, and `optcc verify --all-ranks` proves it for every number of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from optcc.errors import InputError


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Every number from `least` on."""

    least: int = 2

    def __contains__(self, n_ranks: int) -> bool:
        return n_ranks >= self.least

    def __str__(self) -> str:
        return "every number of ranks" if self.least <= 2 else f"every number of ranks from {self.least} on"

    @property
    def one(self) -> str:
        """What one of them is, after "must be"."""
        return f"at least {self.least}"


@dataclass(frozen=True, slots=True)
class PowersOfTwo:
    """1, 2, 4, 8, and so on."""

    def __contains__(self, n_ranks: int) -> bool:
        return n_ranks >= 1 and not n_ranks & (n_ranks - 1)

    def __str__(self) -> str:
        return "every power of two"

    @property
    def one(self) -> str:
        """What one of them is, after "must be"."""
        return "a power of two"


@dataclass(frozen=True, slots=True)
class MultiplesOf:
    """`factor`, twice that, three times, and so on."""

    factor: int

    def __contains__(self, n_ranks: int) -> bool:
        return n_ranks >= 1 and n_ranks % self.factor == 0

    def __str__(self) -> str:
        return f"every multiple of {self.factor}"

    @property
    def one(self) -> str:
        """What one of them is, after "must be"."""
        return f"a multiple of {self.factor}"


Domain = AtLeast | PowersOfTwo | MultiplesOf
ANY_NUMBER = AtLeast(1)


def powers_of_two() -> Domain:
    """The powers of two.

    >>> 8 in powers_of_two(), 6 in powers_of_two()
    (True, False)
    """
    return PowersOfTwo()


def at_least(least: int) -> Domain:
    """All numbers from `least` on; raises InputError unless it is one or more."""
    if least < 1:
        raise InputError(f"domain of at least {least} ranks: must be at least one")
    return AtLeast(least)


def multiples_of(factor: int) -> Domain:
    """The multiples of `factor`; raises InputError unless it is one or more."""
    if factor < 1:
        raise InputError(f"domain of multiples of {factor}: must be of one or more")
    return MultiplesOf(factor)
