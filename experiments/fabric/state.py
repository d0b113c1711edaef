"""What is declared of a fabric: the state file."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from optcc.errors import InputError
from optcc.experiments.fabric.spec import FabricSpec, NicRates, _pair, exact_rate
from optcc.topology import Nic, Server, Topology

STATE_FORMAT: Final = "optcc-fabric/2"
FAILURES: Final = ("down", "carrier", "blackhole", "blackhole-out", "blackhole-in")


@dataclass(frozen=True)
class NicState:
    """The declared condition of one NIC: its rates now and how it has failed (None, or one of FAILURES)."""

    rates: NicRates
    failure: str | None = None


@dataclass(frozen=True)
class FabricState:
    """What is declared of a fabric: `phase` is "building" until it stands; `pid` made it."""

    spec: FabricSpec
    nics: tuple[tuple[NicState, ...], ...]
    phase: str
    pid: int

    @classmethod
    def fresh(cls, spec: FabricSpec, phase: str, pid: int) -> FabricState:
        """The state of a fabric without failures."""
        return cls(spec, tuple(tuple(NicState(rates) for rates in row) for row in spec.rates), phase, pid)

    def with_nics(self, changes: Mapping[tuple[int, int], NicState]) -> FabricState:
        """The same state with other NICs at some (host, NIC)."""
        rows = tuple(
            tuple(changes.get((host, nic), old) for nic, old in enumerate(row)) for host, row in enumerate(self.nics)
        )
        return dataclasses.replace(self, nics=rows)

    def endpoint_rates(self, host: int) -> tuple[Fraction, Fraction]:
        """Bytes per second out of and into a host: its surviving NICs together."""
        alive = [nic.rates for nic in self.nics[host] if nic.failure is None]
        return sum((r.rate_out for r in alive), Fraction(0)), sum((r.rate_in for r in alive), Fraction(0))

    def topology_text(self, hosts: int | None = None) -> str:
        """The first `hosts` hosts (all) as a topology in one argument, a host's surviving NICs pooled.

        >>> state = FabricState.fresh(FabricSpec.parse("4x2@200Mbit/s,3=100Mbit/s"), "up", 1)
        >>> state.topology_text()
        '4@50MB/s,3=25MB/s'
        >>> state.with_nics({(3, 1): NicState(state.nics[3][1].rates, "down")}).topology_text()
        '4@50MB/s,3=12.5MB/s'

        Raises InputError if a host has no NIC left: no topology has such an endpoint.
        """
        ends = [self.endpoint_rates(host) for host in range(self.spec.hosts if hosts is None else hosts)]
        for host, end in enumerate(ends):
            if not all(end):
                raise InputError(f"h{host}: no NIC is left; heal one with `{hint('heal', self.spec.name)} h{host}`")
        alike = Counter(end for end in ends if end[0] == end[1]).most_common(1)
        usual = alike[0][0] if alike else (max(max(end) for end in ends),) * 2
        others = [f"{host}={_pair(*end)}" for host, end in enumerate(ends) if end != usual]
        return ",".join([f"{len(ends)}@{exact_rate(usual[0])}", *others])

    def topology(self, hosts: int | None = None) -> Topology:
        """The first `hosts` hosts (all) as a topology: their ranks, to which the NICs belong if a host has several.

        >>> state = FabricState.fresh(FabricSpec.parse("2x2@200Mbit/s/2ranks+1Gbit/s"), "up", 1)
        >>> down = state.with_nics({(1, 1): NicState(state.nics[1][1].rates, "down")}).topology()
        >>> down.n_ranks, [int(rate) for rate in down.out], int(down.servers[0].fabric)
        (4, [50000000, 25000000], 125000000)
        """
        spec = self.spec
        inside = None if spec.inside is None else spec.inside.rate_out
        topology = Topology(
            tuple(
                Server(
                    f"h{host}",
                    spec.ranks,
                    tuple(
                        Nic(number, nic.rates.rate_out, nic.rates.rate_in, nic.failure is not None)
                        for number, nic in enumerate(self.nics[host])
                    ),
                    inside,
                )
                for host in range(spec.hosts if hosts is None else hosts)
            )
        )
        return topology.with_own_nics() if spec.ranks > 1 else topology

    def to_json(self) -> str:
        """The text of the state file; rates in bits per second."""
        declared = [[[rates.bits_out, rates.bits_in] for rates in row] for row in self.spec.rates]
        now = [[[nic.rates.bits_out, nic.rates.bits_in, nic.failure] for nic in row] for row in self.nics]
        record = {"format": STATE_FORMAT, "name": self.spec.name, "phase": self.phase, "pid": self.pid}
        inside = self.spec.inside
        record |= {"ranks": self.spec.ranks, "inside": None if inside is None else [inside.bits_out, inside.bits_in]}
        return json.dumps({**record, "declared": declared, "now": now}) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> FabricState:
        """The state that a file of fabric `name` says; raises InputError if it does not say one."""
        try:
            record = json.loads(text)
            demand(isinstance(record, dict), "not an object")
            demand(record.get("format") == STATE_FORMAT, f"format is not {STATE_FORMAT}")
            demand(record.get("name") == name, f"name is {record.get('name')!r}")
            demand(record.get("phase") in ("building", "up"), f"phase is {record.get('phase')!r}")
            demand(type(record.get("pid")) is int and record["pid"] > 0, f"pid is {record.get('pid')!r}")
            declared = tuple(tuple(_rates(item[:2]) for item in _row(row, 2)) for row in _row(record.get("declared")))
            now = tuple(
                tuple(NicState(_rates(item[:2]), _failure(item[2])) for item in _row(row, 3))
                for row in _row(record.get("now"))
            )
            demand([len(row) for row in declared] == [len(row) for row in now], "declared and now differ in shape")
            ranks, inside = record.get("ranks"), record.get("inside")
            demand(type(ranks) is int, f"ranks is {ranks!r}")
            demand(inside is None or (isinstance(inside, list) and len(inside) == 2), f"inside is {inside!r:.40}")
            spec = FabricSpec(name, declared, ranks, None if inside is None else _rates(inside))
            return cls(spec, now, record["phase"], record["pid"])
        except (ValueError, RecursionError) as error:
            reason = str(error)
        except InputError as error:
            reason = str(error)
        raise InputError(
            f"state of fabric {name}: not one that optcc wrote ({reason}): run `{hint('down', name)}`"
        ) from None


def demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _row(value: object, width: int | None = None) -> list[Any]:
    """`value` as a list; with `width`, a list of lists of that length."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is not a list")
    if width is not None:
        demand(all(isinstance(item, list) and len(item) == width for item in value), f"a NIC has not {width} values")
    return value


def _rates(pair: Sequence[object]) -> NicRates:
    for bits in pair:
        demand(type(bits) is int, f"rate {bits!r:.40} is not a whole number")
    return NicRates(Fraction(str(pair[0])) / 8, Fraction(str(pair[1])) / 8)


def _failure(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in FAILURES):
        return value
    raise ValueError(f"failure is {value!r:.40}")


def hint(verb: str, name: str) -> str:
    """The command line of a fabric command.

    >>> hint("down", "default"), hint("down", "trial")
    ('optcc fabric down', 'optcc fabric down --name trial')
    """
    return f"optcc fabric {verb}" + ("" if name == "default" else f" --name {name}")
