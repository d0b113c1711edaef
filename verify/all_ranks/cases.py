"""The cases of a schedule's parameters that a proof covers one by one, and concrete schedules that stand for each.

A case (`Covered`) has symbols for the ranks and the parameters, for the symbolic interpreter; an instance has numbers,
for the plan verifier and for the comparison of the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from optcc.domain import ANY_NUMBER, AtLeast, Domain, MultiplesOf, PowersOfTwo
from optcc.dsl import Definition
from optcc.errors import TopologyError
from optcc.topology import Topology
from optcc.verify.all_ranks.chunk_program import ProofStops
from optcc.verify.all_ranks.symbolic import ParameterCase
from optcc.verify.all_ranks.symbolic_terms import Term, power
from optcc.verify.all_ranks.symbolic_values import AnyOrder, Opaque

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ARBITRARY = frozenset({"rates", "order", "lost", "straggler", "pairs", "rails", "rings", "find"})
_OF_NICS = frozenset({"homes", "owners", "network"})
_FOUND = frozenset({"pairs", "find", "rings", *_OF_NICS})
"""Trees and rings, which a search finds for a topology: it may take seconds for many ranks."""
_FOUND_VARIED_MAX = 8
_FOUND_EACH_MAX = 16
_FOUND_ABOVE = (24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class Covered:
    """A case, and `sizes_of(ranks, parameters)`: its variables for a concrete schedule, None for another case."""

    case: ParameterCase
    sizes_of: Callable[[int, Mapping[str, Any]], dict[str, int] | None]


@dataclass(frozen=True, slots=True)
class Instance:
    """The arguments of a concrete schedule: ranks, parameters, root."""

    n_ranks: int
    parameters: Mapping[str, Any]
    root: int

    def __str__(self) -> str:
        given = "".join(f", {name} = {_short(value)}" for name, value in self.parameters.items())
        return f"p = {self.n_ranks}{given}" + (f", root = {self.root}" if self.root else "")


def _short(value: Any) -> str:
    text = str(tuple(value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def cases_of(definition: Definition) -> tuple[Covered, ...]:
    """The cases of a schedule's parameters, by the names that the library uses.

    `gpus`, a number, ranges over GPUs per server; `stragglers` over single servers; `order`, and `rates` with `gpus`,
    are arbitrary. A parameter of another name has its default value, if it has one.

    Raises ProofStops for a domain together with servers.
    """
    parameters = inspect.signature(definition.function).parameters
    names = set(list(parameters)[1:])
    found = _cases(names, definition.domain)
    if definition.collective in ("gather", "scatter"):
        found = tuple(
            replace(each, case=replace(each.case, name=f"{each.case.name}, any root", straggler="root"))
            for each in found
            if each.case.straggler is None
        )
    given = {name for covered in found for name, _ in covered.case.values}
    others = [f"{name} = {parameters[name].default!r}" for name in parameters if name in names - given]
    if not others:
        return found
    said = f", with {', '.join(others)}"
    return tuple(replace(each, case=replace(each.case, name=each.case.name + said)) for each in found)


def _cases(names: set[str], domain: Domain) -> tuple[Covered, ...]:
    """The cases for these names of parameters, and these numbers of ranks."""
    if names & {"stragglers", "gpus"} and domain != ANY_NUMBER:
        raise ProofStops(f"{domain}, where servers are a parameter, is not covered")
    if "stragglers" in names:
        return _straggler_cases("gpus" in names)
    sizes, p, words, size_of = _of_domain(domain)
    if names & _ARBITRARY:
        given = sorted(names & (_ARBITRARY | {"gpus", "server"}))
        opaque = tuple((name, AnyOrder() if name == "order" else Opaque(name)) for name in given)
        what = " and ".join(name for name, _ in opaque)
        return (Covered(ParameterCase(f"{words}, any {what}", sizes, p, opaque), lambda ranks, given: size_of(ranks)),)
    if "gpus" in names:
        return _gpu_cases()
    return (Covered(ParameterCase(words, sizes, p), lambda ranks, given: size_of(ranks) if not given else None),)


def _of_domain(domain: Domain) -> tuple[tuple[tuple[str, int], ...], Term, str, Callable[[int], dict[str, int]]]:
    """The variable of a domain with its least value, the number of ranks by it, that in words, and its value by the
    number of ranks."""
    match domain:
        case AtLeast(least):
            low = max(least, 2)
            return (("p", low),), Term.var("p"), f"p >= {low}", lambda ranks: {"p": ranks}
        case PowersOfTwo():
            words = "p = 2^n, n >= 1"
            return (("n", 1),), power(Term.var("n")), words, lambda ranks: {"n": ranks.bit_length() - 1}
        case MultiplesOf(factor):
            low = 1 if factor > 1 else 2
            words = f"p = {factor} m, m >= {low}"
            return (("m", low),), Term.var("m") * factor, words, lambda ranks: {"m": ranks // factor}


def _straggler_cases(with_gpus: bool) -> tuple[Covered, ...]:
    """One straggler s among q + 1 servers of one GPU and, `with_gpus`, among servers of g GPUs."""
    q, g, s = (Term.var(name) for name in "qgs")
    flat = (("stragglers", [s]), *((("gpus", Term.of(1)),) if with_gpus else ()))
    covered = (
        Covered(
            ParameterCase("2 servers of one GPU, any one straggler", (), Term.of(2), flat, None, "s"),
            lambda ranks, given: _straggler_sizes(ranks, given, lambda gpus, q: gpus == 1 and q == 1, "s"),
        ),
        Covered(
            ParameterCase("p >= 3 servers of one GPU, any one straggler", (("q", 2),), q + 1, flat, None, "s"),
            lambda ranks, given: _straggler_sizes(ranks, given, lambda gpus, q: gpus == 1 and q >= 2, "qs"),
        ),
    )
    if not with_gpus:
        return covered
    several, any_one = (("stragglers", [s]), ("gpus", g)), "servers of g >= 2 GPUs, any one straggler"
    return (
        *covered,
        Covered(
            ParameterCase(f"2 {any_one}", (("g", 2),), g * 2, several, g, "s"),
            lambda ranks, given: _straggler_sizes(ranks, given, lambda gpus, q: gpus >= 2 and q == 1, "gs"),
        ),
        Covered(
            ParameterCase(f"p/g >= 3 {any_one}", (("q", 2), ("g", 2)), (q + 1) * g, several, g, "s"),
            lambda ranks, given: _straggler_sizes(ranks, given, lambda gpus, q: gpus >= 2 and q >= 2, "qgs"),
        ),
    )


def _gpu_cases() -> tuple[Covered, ...]:
    """N servers of g GPUs, either of them being one or more."""
    g, n = Term.var("g"), Term.var("N")
    return (
        Covered(
            ParameterCase("p >= 2 servers of one GPU", (("N", 2),), n, (("gpus", Term.of(1)),)),
            lambda ranks, given: {"N": ranks} if given["gpus"] == 1 and ranks >= 2 else None,
        ),
        Covered(
            ParameterCase("one server of p >= 2 GPUs", (("g", 2),), g, (("gpus", g),)),
            lambda ranks, given: {"g": ranks} if given["gpus"] == ranks >= 2 else None,
        ),
        Covered(
            ParameterCase("p/g >= 2 servers of g >= 2 GPUs", (("N", 2), ("g", 2)), n * g, (("gpus", g),), g),
            lambda ranks, given: (
                {"N": ranks // given["gpus"], "g": given["gpus"]} if 2 <= given["gpus"] < ranks else None
            ),
        ),
    )


def _straggler_sizes(
    ranks: int, given: Mapping[str, Any], fits: Callable[[int, int], bool], names: str
) -> dict[str, int] | None:
    gpus, (straggler, *others) = given.get("gpus", 1), given["stragglers"]
    sizes = {"q": ranks // gpus - 1, "g": gpus, "s": straggler}
    return {name: sizes[name] for name in names} if not others and fits(gpus, sizes["q"]) else None


def instances_of(definition: Definition, p: int) -> tuple[Instance, ...]:
    """Representative concrete schedules over p ranks: each server, or a sample, as the straggler; each number of GPUs
    that divides p; the first and the last rank as root. None for most p above 16 where trees or rings must be found."""
    names = set(list(inspect.signature(definition.function).parameters)[1:])
    if p not in definition.domain or (names & _FOUND and p > _FOUND_EACH_MAX and p not in _FOUND_ABOVE):
        return ()
    texts = [f"{p}@4GB/s"]
    some = range(p) if p <= 6 else sorted({0, p // 2, p - 1})
    if names & {"stragglers", "straggler", "rates", "order"}:
        texts += [f"{p}@4GB/s,{slow}=2GB/s" for slow in some]
    if "rates" in names and p > 2:
        texts.append(f"{p}@4GB/s,0=1GB/s,1=3GB/s:2GB/s")
    if "gpus" in names:
        for gpus in (each for each in range(2, p + 1) if p % each == 0):
            texts.append(f"{p // gpus}x{gpus}@4GB/s")
            if "stragglers" in names and p // gpus > 1:
                texts += [f"{p // gpus}x{gpus}@4GB/s,{slow}=2GB/s" for slow in {0, p // gpus - 1}]
    if names & {"find", "pairs"}:
        texts.append(f"{p}@4GB/s,{p - 1}=2GB/s")
    if names & {"rails", "rings", "pairs", *_OF_NICS}:
        for gpus in (each for each in range(2, p) if p % each == 0):
            texts += [f"{p // gpus}x{gpus}@4GB/s+40GB/s{lost}" for lost in ("", f",0=1/{gpus}", "/rails")]
    found: dict[str, Instance] = {}
    for text in texts:
        if found and names & _FOUND and p > _FOUND_VARIED_MAX:
            break
        try:
            parameters = definition.configure(Topology.parse(text))
        except TopologyError:
            continue
        for root in sorted({0, p - 1}) if definition.collective in _ROOTED else (0,):
            orders = [parameters]
            if "order" in names:
                orders.append({**parameters, "order": (*range(1, p, 2), *range(0, p, 2))})
            for each in orders:
                instance = Instance(p, each, root)
                found.setdefault(str(sorted(each.items())) + str(root), instance)
    return tuple(found.values())
