"""`Priced`: what the certificates of both models share: prices of ports that prove a bound, a file with a digest."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from typing import ClassVar, Protocol

from optcc.show import Card, Shown
from optcc.units import show_rate, show_size, show_time
from optcc.verify.bounds.network import FlowNetwork


class Reached(Protocol):
    """What a certificate says can be done."""

    @property
    def seconds(self) -> Fraction:
        """In this time, in the fluid limit."""
        ...


class Priced(Shown):
    """Mixin of certificates: the prices of the ports of `network`, the bound `seconds` that follows, and what is
    `achieved`, if that is known."""

    __slots__ = ()
    FORMAT: ClassVar[str]

    network: FlowNetwork
    size_bytes: int
    prices: tuple[Fraction, ...]
    supply: Fraction
    seconds: Fraction

    @property
    def collective(self) -> str:
        """Its name."""
        raise NotImplementedError

    def reached(self) -> Reached | None:
        """What is achieved, if that is known."""
        raise NotImplementedError

    def _content(self) -> dict[str, object]:
        """The file's content but for its format and its digest."""
        raise NotImplementedError

    @property
    def binding(self) -> tuple[str, ...]:
        """The ports with a nonzero price."""
        return tuple(p.name for p, price in zip(self.network.ports, self.prices, strict=True) if price)

    @property
    def shares(self) -> dict[str, Fraction]:
        """The share of each binding port in the bound: 1 % more rate there lowers the bound by share %."""
        return {
            port.name: port.rate * price / self.supply
            for port, price in zip(self.network.ports, self.prices, strict=True)
            if price
        }

    @property
    def gap(self) -> Fraction | None:
        """The relative gap between what is achieved and the bound; None if nothing is known to be achieved."""
        reached = self.reached()
        if reached is None:
            return None
        return reached.seconds / self.seconds - 1 if self.seconds else reached.seconds

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical content: that of `as_json`, keys sorted, no blanks."""
        return digest_of(self.FORMAT, self._content())

    def as_json(self) -> dict[str, object]:
        """The file's content as plain values; fractions as "a/b"."""
        return {"format": self.FORMAT, "digest": self.digest, **self._content()}

    def to_bytes(self) -> bytes:
        """The file."""
        lines = (f"{json.dumps(key)}: {_canonical(value)}" for key, value in self.as_json().items())
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    def card(self) -> Card:
        rates = {port.name: port.rate for port in self.network.ports}
        rows = tuple(
            (name, show_rate(rates[name]), f"{float(100 * share):.2f} %")
            for name, share in sorted(self.shares.items(), key=lambda each: -each[1])
        )
        what = f"no {self.collective} of {show_size(self.size_bytes)}"
        title = f"{what} is faster than {show_time(float(self.seconds))}"
        reached = self.reached()
        if reached is not None:
            title += f"; {show_time(float(reached.seconds))} can be done"
        return Card(title, ("port", "rate", "of the bound"), rows)


def network_content(network: FlowNetwork) -> dict[str, object]:
    """The part of a file that states the network."""
    return {
        "endpoints": list(network.endpoints),
        "switches": list(network.switches),
        "ports": [{"name": port.name, "rate": write_ratio(port.rate)} for port in network.ports],
        "links": [{"tail": link.tail, "head": link.head, "ports": list(link.ports)} for link in network.links],
    }


def write_ratio(number: Fraction) -> str:
    """The text "a/b", in lowest terms, also for a whole number."""
    return f"{number.numerator}/{number.denominator}"


def digest_of(file_format: str, content: dict[str, object]) -> str:
    """SHA-256 of the canonical form of a file's content and its format."""
    return hashlib.sha256(_canonical({"format": file_format, **content}).encode()).hexdigest()


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
