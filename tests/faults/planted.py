"""Faults to plant in the protocol, one at a time: `optcc.runtime.sim.swarm` must find them.

A fault is a change of the source of a function or method, compiled anew for as long as it is planted. Those of `FIXES`
undo what once mended a bug; those of `MUTATIONS` were made up. If the protocol changes so that one cannot be planted
any more, `plant` says so: state it anew, or take another one.

What only makes a loss known later, half a second say, is not among them: timers and the other end notice as well, and
all promises of the swarm hold. That an end which gives a connection up tells the other one, and that a probe of a
closed window which is not answered is silence, is for `tests/unit/runtime/protocol` (outbound, suspicion; liveness).

    python -m tests.faults.planted [NAME ...]

finds the first seed of each, below 2,000.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as changed
from types import ModuleType
from typing import Any

from optcc import failover, failover_cache
from optcc.failover import Row
from optcc.runtime.protocol import connection, frames, inbound, membership, outbound
from optcc.runtime.protocol.agreement import Agreement
from optcc.runtime.protocol.connection import RecvConnection, SendConnection
from optcc.runtime.protocol.detour import Detours
from optcc.runtime.protocol.endpoint import Endpoint
from optcc.runtime.protocol.epochs import Epochs
from optcc.runtime.protocol.exchange import Exchange
from optcc.runtime.protocol.inbound import Inbound
from optcc.runtime.protocol.leg import Leg
from optcc.runtime.protocol.liveness import Connection
from optcc.runtime.protocol.membership import Membership
from optcc.runtime.protocol.outbound import Outbound
from optcc.runtime.protocol.rates import Rates
from optcc.runtime.protocol.relay import Relays
from optcc.runtime.protocol.reports import Reports
from optcc.runtime.protocol.suspicion import Suspicion
from optcc.runtime.protocol.trials import Trials
from optcc.runtime.sim.swarm import run_seed
from optcc.runtime.sim.swarm_program import Violation

SEEDS = 2000


@dataclass(frozen=True)
class PlantedFault:
    """In `function` of `owner`, a class or a module, `old` is replaced by `new`.

    `everywhere`: other modules that have imported the function. A function of the failover table stands in rows.
    """

    name: str
    owner: type | ModuleType
    function: str
    old: str
    new: str
    everywhere: tuple[ModuleType, ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Within it the fault is there."""
        former = inspect.getattr_static(self.owner, self.function)
        mutant = _compile(former, self.old, self.new)
        with _set([(place, self.function, mutant) for place in (self.owner, *self.everywhere)]):
            if self.owner is not failover:
                yield
                return
            with _set(_rows_with(former, mutant)):
                yield


def _compile(function: Any, old: str, new: str) -> Any:
    """The function with its source changed."""
    inner: Any = function.fget if isinstance(function, property) else function
    source = textwrap.dedent(inspect.getsource(inner))
    assert source.count(old) == 1, f"{inner.__qualname__}: {source.count(old)} times: {old}"
    code = compile(source.replace(old, new), f"<{inner.__qualname__}>", "exec", __future__.annotations.compiler_flag)
    names: dict[str, Any] = {}
    exec(code, sys.modules[inner.__module__].__dict__, names)
    return names[inner.__name__]


@contextmanager
def _set(places: list[tuple[Any, str, Any]]) -> Iterator[None]:
    formers = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in formers:
            setattr(owner, name, value)


def _rows_with(former: Callable[..., Any], mutant: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    """The tables in which one function stands for another, and where they are known."""

    def taught(row: Row[Any]) -> Row[Any]:
        effect = mutant if row.effect is former else row.effect
        return changed(row, guard=mutant if row.guard is former else row.guard, effect=effect)

    senders = tuple(map(taught, failover.SENDER_ROWS))
    receivers = tuple(map(taught, failover.RECEIVER_ROWS))
    return [
        *((module, "SENDER_ROWS", senders) for module in (failover, failover_cache, outbound)),
        *((module, "RECEIVER_ROWS", receivers) for module in (failover, failover_cache, inbound)),
    ]


FIXES = (
    PlantedFault(
        "the newest copy of a chunk takes the slot from one that is half there",
        *(
            Inbound,
            "begin",
            "return memoryview(bytearray(length))\n    end.arriving",
            "end.arriving[number].turn_away()\n    end.arriving",
        ),
    ),
    PlantedFault(
        "an early chunk that is not the next one is overlooked when a slot is posted",
        *(Inbound, "post_eager", "if is_here else channel.early", "if is_here else False"),
    ),
    PlantedFault(
        "a word about a suspicion that was overtaken counts",
        *(Suspicion, "hear", "count <= connection.doubts_heard", "False"),
    ),
    PlantedFault(
        "chunks stay in the queue of a connection that is avoided",
        *(Outbound, "update_avoided", "connection.take_back()", "pass"),
    ),
    PlantedFault(
        "states that went with messages of the opposite direction are lost with its connection",
        *(Outbound, "lose", "opposite.repeat_states()", "pass"),
    ),
    PlantedFault(
        "a message that was delivered before its slot was reported owes no report",
        *(Inbound, "_note_delivery", "channel.delivered > channel.told", "False"),
    ),
    PlantedFault(
        "time counts that nobody has watched",
        *(Endpoint, "tick", "min(now_s - self._ticked_s, TICK_S)", "now_s - self._ticked_s"),
    ),
    PlantedFault(
        "virtual rails stand for a lost rail, and nobody maps them anew",
        *(Outbound, "_tell", "self._remap(channel)", "pass"),
    ),
    PlantedFault(
        "the virtual rail of a proposal is mapped to another rail",
        *(Outbound, "_map_rail", " or (sender.changing and virtual == sender.asked)", ""),
    ),
    PlantedFault(
        "the last states are not repeated when a rank leaves",
        *(Endpoint, "bye", "inbound.final_states(connection.session)", 'b""'),
    ),
    PlantedFault(
        "a rank leaves before its messages are acknowledged",
        *(Endpoint, "_owes", " or (outbound is not None and outbound.has_work())", ""),
    ),
    PlantedFault(
        "a rank leaves though a peer has lost all connections",
        *(
            Endpoint,
            "_owes",
            "was_joined and all(self.is_leaving and each.awaits for each in connections)",
            "False",
        ),
    ),
    PlantedFault(
        "a rank leaves though a peer that computes has not taken its messages",
        *(Endpoint, "may_leave", "LINGER_S if self._is_reached(peer) else self._absent_s(peer)", "CLOSE_S"),
    ),
    PlantedFault(
        "a report of one channel clears what is owed for another",
        *(Inbound, "owes_report", "any(", "all("),
    ),
    PlantedFault(
        "a peer that is waited for and has never connected is not dialled",
        *(Inbound, "tick", "self.has_work()", "False"),
    ),
    PlantedFault(
        "a plan is proposed on a channel that is not open",
        *(Outbound, "lose", " and channel.sender.offered", ""),
    ),
    PlantedFault(
        "a damaged chunk of a former epoch counts as on its way",
        *(Inbound, "discard", "del end.arriving[number]", "pass"),
    ),
    PlantedFault(
        "idle connections to a peer that is waited for are not probed",
        *(Suspicion, "probe_idle", "self._probe_idle(self._local.up_to(peer))", "pass"),
    ),
)

MUTATIONS = (
    PlantedFault("no deduplication", *(Inbound, "begin", "not is_fresh(", "False and not is_fresh(")),
    PlantedFault(
        "the sender sends too many chunks early",
        *(Outbound, "_offer", "min(EARLY_CHUNKS_MAX, self._link.window)", "self._link.window"),
    ),
    PlantedFault(
        "the sender sends early though the channel may not be open",
        *(Outbound, "_offer", "channel.has_copies and channel.slots and", "channel.has_copies and"),
    ),
    PlantedFault("slots are not taken from a state", *(Outbound, "take_state", "slots > channel.slots", "False")),
    PlantedFault(
        "a state that was overtaken takes slots back",
        *(Outbound, "take_state", "max(channel.slots, slots)", "slots"),
    ),
    PlantedFault("an eager message is not copied", *(Outbound, "post", "memoryview(bytes(view))", "view")),
    PlantedFault(
        "an eager message that is written at once is not copied",
        *(Outbound, "post_eager", "chunks.append((memoryview(copy)", "chunks.append((view"),
    ),
    PlantedFault(
        "a chunk is acknowledged before it has come",
        *(Inbound, "state_of", "channel.delivered, channel.posted", "channel.posted, channel.posted"),
    ),
    PlantedFault(
        "one chunk too many is freed",
        *(
            failover,
            "_acknowledged",
            "free_to(state, event.number)",
            "free_to(state, min(event.number + 1, state.sent))",
        ),
    ),
    PlantedFault("a chunk goes into the wrong slot", *(Inbound, "begin", "end.slots[ahead][0]", "end.slots[0][0]")),
    PlantedFault(
        "a copy that came beside the slot stays there",
        *(Inbound, "complete", "end.slots[ahead][0][:] = chunk", "pass"),
    ),
    PlantedFault("a slot is written after it was delivered", *(Inbound, "complete", "other.turn_away()", "pass")),
    PlantedFault(
        "the sender's window is one chunk too large",
        *(failover, "put_out", "link.window - n_out", "link.window + 1 - n_out"),
    ),
    PlantedFault(
        "the receiver's window is one chunk too small",
        *(failover, "is_fresh", "state.delivered + link.window", "state.delivered + link.window - 1"),
        everywhere=(inbound,),
    ),
    PlantedFault(
        "a bye is ignored by the sender", *(SendConnection, "received", "self.left = bool(flags & FAILED)", "pass")
    ),
    PlantedFault("a bye is ignored", *(Endpoint, "_note_controls", "connection.left is not None", "False")),
    PlantedFault(
        "a chunk still counts as coming over a connection that was given up",
        *(Inbound, "lose", "del channel.arriving[number]", "pass"),
    ),
    PlantedFault(
        "the receiver's table is not told that a rail is lost",
        *(Inbound, "lose", "self._tell(channel, connection.rail, DOWN)", "pass"),
    ),
    PlantedFault(
        "the sender's table is not told that a rail is lost",
        *(Outbound, "lose", "self._tell(channel, connection.rail, DOWN)", "pass"),
    ),
    PlantedFault(
        "the sender's table is not told that a rail is up",
        *(Outbound, "joined", "self._tell(channel, dialing.rail, UP)", "pass"),
    ),
    PlantedFault(
        "a rail that was avoided is never used again",
        *(Outbound, "update_avoided", "DOWN if connection.is_avoided else UP", "DOWN"),
    ),
    PlantedFault(
        "no connection is found silent", *(Connection, "is_silent", "return self._silent_s >= limit_s", "return False")
    ),
    PlantedFault(
        "a suspicion does not end",
        *(
            Connection,
            "is_silent",
            "self.stalls, self.suspect = acked_bytes, 0.0, False, False",
            "self.stalls = acked_bytes, 0.0, False",
        ),
    ),
    PlantedFault(
        "a rank that refuses connections is waited for",
        *(membership, "_find_unreachable", "is_refused and not is_heard", "False"),
    ),
    PlantedFault(
        "a pair without a rail is waited for",
        *(membership, "_find_unreachable", "to.dark_s >= local.settings.cut_off_s", "False"),
    ),
    PlantedFault("news of failures is ignored", *(Endpoint, "_note_controls", "kind == NEWS_FRAME", "False")),
    PlantedFault(
        "a failure that is heard of is not passed on",
        *(
            Membership,
            "take_word",
            "self._note(self.agreement.hear(connection.peer, state))",
            "self.agreement.hear(connection.peer, state)",
        ),
    ),
    PlantedFault(
        "a rank decides for itself which failure it was", *(Membership, "tick", "not self._missing() or", "True or")
    ),
    PlantedFault("nobody asks who is out of reach", *(Membership, "tick", "self._waited_s >= _REACH_S", "False")),
    PlantedFault(
        "a barrier takes the message of the round before",
        *(Exchange, "__init__", "receives.n_received + 1", "receives.n_received"),
    ),
    PlantedFault(
        "an eager message counts as sent before its slot is posted",
        *(Outbound, "_report_copies", " or acked + i >= channel.slots", ""),
    ),
    PlantedFault(
        "nobody looks for a path through other ranks", *(Outbound, "_tick_detour", "self._dial_detour()", "pass")
    ),
    PlantedFault(
        "a receiver goes on to report over rails that are lost",
        *(Inbound, "_map_rails", "self._rails = rails", "pass"),
    ),
    PlantedFault(
        "a new channel waits for a rail of its pair, and there is a path through other ranks",
        *(Outbound, "channel", "self._remap(channel)", "pass"),
    ),
    PlantedFault(
        "a path that did not work is tried again", *(Detours, "find", "tried.update(pairwise((*via, peer)))", "pass")
    ),
    PlantedFault(
        "a rank is given up while one that may pass on bytes to it computes",
        *(Outbound, "_waits_in_vain", " and not self._detours.may_come(self.peer)", ""),
    ),
    PlantedFault("a leg that was full is not read again", *(Relays, "note_written", "self._resume(leg.other)", "pass")),
    PlantedFault(
        "a part that was passed on is passed on again", *(Leg, "written", "self._waiting[0] = first[n_bytes:]", "pass")
    ),
    PlantedFault("an early chunk is not copied into its slot", *(Inbound, "post", "view[start:end] = chunk", "pass")),
    PlantedFault(
        "an early message is not copied into its slot",
        *(Inbound, "post_eager", "view[:] = channel.early.pop(number)", "channel.early.pop(number)"),
    ),
    PlantedFault(
        "a virtual rail on which a chunk is out is mapped to another rail",
        *(Outbound, "_map_rail", "return False\n    channel.rails", "pass\n    channel.rails"),
    ),
    PlantedFault(
        "a report that a message should carry is dropped",
        *(Reports, "attach", "last = inbound.state_of(k)", "inbound.state_of(k)"),
    ),
    PlantedFault("a deferred report is not released", *(Reports, "release_late", "self._release(connection)", "pass")),
    PlantedFault(
        "a part that was written is written again",
        *(SendConnection, "written", "pending[0] = memoryview(pending[0])[n_bytes:]", "pass"),
    ),
    PlantedFault(
        "a wrong checksum of a chunk that has come elsewhere counts as damage",
        *(RecvConnection, "_finish_chunk", "self._reader.wants(*self._chunk)", "True"),
    ),
    PlantedFault(
        "the checksum of a chunk is not compared", *(RecvConnection, "_finish_chunk", "self._sum != self._crc", "False")
    ),
    PlantedFault(
        "the checksum of a header is not compared",
        *(frames, "decode", "seal != crc32(data[at : at + _BODY_BYTES], 0)", "False"),
        everywhere=(connection,),
    ),
    PlantedFault(
        "a connection that is replaced stays", *(Inbound, "joined", 'self.lose(former, Broken("replaced"))', "pass")
    ),
    PlantedFault(
        "what was out on a lost rail is not sent again",
        *(failover, "_sender_lost_rail", "NOWHERE if rail == event.rail else rail", "rail"),
    ),
    PlantedFault(
        "a proposal that was out on a lost rail is not made again",
        *(failover, "_sender_lost_rail", "state.changing and state.asked == event.rail", "False"),
    ),
    PlantedFault(
        "the next plan begins one chunk late",
        *(failover, "_agreed", "free_to(state, event.number)", "free_to(state, min(event.number + 1, state.sent))"),
    ),
    PlantedFault(
        "messages are reported out of order",
        *(Outbound, "post_eager", "not (has_slot and in_order)", "not has_slot"),
    ),
    PlantedFault("a message counts as sent with its first chunk", *(Outbound, "post", "i == last", "i == 0")),
    PlantedFault(
        "a message counts as received with its first chunk", *(Inbound, "post", "i == len(pieces) - 1", "i == 0")
    ),
    PlantedFault("chunks that are moved wait for a write", *(Outbound, "take_parts", "self._local.wake(to)", "pass")),
    PlantedFault(
        "a chunk is moved though another one is out on its virtual rail",
        *(Outbound, "_move", " or sender.out.count(virtual) > 1", ""),
    ),
    PlantedFault("a timeout ends what is waited for", *(Exchange, "step", "return False", "pass")),
    PlantedFault(
        "a rank that is ready begins collectives without knowing that the others are",
        *(Agreement, "begin", "self.next >= said", "False"),
    ),
    PlantedFault(
        "an epoch counts from where the last rank is, not the first",
        *(Agreement, "_agree", "max(ready.values())", "min(ready.values())"),
    ),
    PlantedFault(
        "words about epochs are not said on new connections", *(Epochs, "joined", "self.agreement.words()", "()")
    ),
    PlantedFault(
        "words about epochs are not passed on", *(Epochs, "hear", "self.spread()", "self.agreement.to_say.clear()")
    ),
    PlantedFault("a rank that leaves does not say from which epoch on", *(Agreement, "leave", "self.hear(", "bool(")),
    PlantedFault(
        "nobody looks after a rank of which only a word is awaited",
        *(Inbound, "has_work", " or self.peer in self._local.awaited", ""),
    ),
    PlantedFault(
        "a rank forgets who was ready for its epoch",
        *(Agreement, "_agree", "self._ready.pop(number - 1, None)", "self._ready.pop(number, None)"),
    ),
)

# Faults of the meters, which `slow_nics` finds: they change no bit, and what is believed of NICs.
METER_FAULTS = (
    PlantedFault("a slow rail is always the sender's NIC", *(Rates, "_note_out", "len(waited) == 1", "False")),
    PlantedFault("padding goes to the peer of the slow rail", *(Trials, "_third", "each.peer != but and ", "")),
    PlantedFault("a trial finds for the padding at once", *(Trials, "_conclude", "share <= _SHARED", "share <= 2")),
    PlantedFault(
        "a receiver does not take the blame",
        *(Trials, "hear", "self._rates.know_in(word.theirs, word.share)", "pass"),
    ),
)

FAULTS = {fault.name: fault for fault in (*FIXES, *MUTATIONS)}


FOUND_BY = {
    "the newest copy of a chunk takes the slot from one that is half there": 99,
    "an early chunk that is not the next one is overlooked when a slot is posted": 56,
    "a word about a suspicion that was overtaken counts": 380,
    "chunks stay in the queue of a connection that is avoided": 0,
    "states that went with messages of the opposite direction are lost with its connection": 445,
    "a message that was delivered before its slot was reported owes no report": 49,
    "time counts that nobody has watched": 26,
    "virtual rails stand for a lost rail, and nobody maps them anew": 8,
    "the virtual rail of a proposal is mapped to another rail": 292,
    "the last states are not repeated when a rank leaves": 143,
    "a rank leaves before its messages are acknowledged": 39,
    "a rank leaves though a peer has lost all connections": 44,
    "a rank leaves though a peer that computes has not taken its messages": 44,
    "a report of one channel clears what is owed for another": 579,
    "a peer that is waited for and has never connected is not dialled": 253,
    "a plan is proposed on a channel that is not open": 138,
    "a damaged chunk of a former epoch counts as on its way": 734,
    "idle connections to a peer that is waited for are not probed": 41,
    "no deduplication": 1,
    "the sender sends too many chunks early": 530,
    "the sender sends early though the channel may not be open": 4,
    "slots are not taken from a state": 1,
    "an eager message is not copied": 7,
    "an eager message that is written at once is not copied": 48,
    "a chunk is acknowledged before it has come": 0,
    "one chunk too many is freed": 0,
    "a chunk goes into the wrong slot": 0,
    "a copy that came beside the slot stays there": 0,
    "a slot is written after it was delivered": 133,
    "the sender's window is one chunk too large": 0,
    "the receiver's window is one chunk too small": 0,
    "a bye is ignored": 123,
    "a chunk still counts as coming over a connection that was given up": 1,
    "the receiver's table is not told that a rail is lost": 0,
    "the sender's table is not told that a rail is lost": 0,
    "the sender's table is not told that a rail is up": 0,
    "a rail that was avoided is never used again": 14,
    "no connection is found silent": 5,
    "a suspicion does not end": 133,
    "a rank that refuses connections is waited for": 61,
    "a pair without a rail is waited for": 5,
    "news of failures is ignored": 14,
    "a failure that is heard of is not passed on": 9,
    "a rank decides for itself which failure it was": 14,
    "a barrier takes the message of the round before": 3,
    "an eager message counts as sent before its slot is posted": 4,
    "a receiver goes on to report over rails that are lost": 8,
    "a part that was passed on is passed on again": 80,
    "an early chunk is not copied into its slot": 56,
    "an early message is not copied into its slot": 4,
    "a virtual rail on which a chunk is out is mapped to another rail": 22,
    "a report that a message should carry is dropped": 29,
    "a deferred report is not released": 31,
    "a part that was written is written again": 0,
    "the checksum of a chunk is not compared": 8,
    "a connection that is replaced stays": 30,
    "what was out on a lost rail is not sent again": 1,
    "a proposal that was out on a lost rail is not made again": 0,
    "the next plan begins one chunk late": 0,
    "a message counts as sent with its first chunk": 0,
    "a message counts as received with its first chunk": 0,
    "chunks that are moved wait for a write": 292,
    "a chunk is moved though another one is out on its virtual rail": 292,
    "a timeout ends what is waited for": 3,
    "a rank that is ready begins collectives without knowing that the others are": 1,
    "an epoch counts from where the last rank is, not the first": 1,
    "words about epochs are not said on new connections": 579,
    "a rank that leaves does not say from which epoch on": 28,
    "a rank forgets who was ready for its epoch": 27,
}
"""Of most faults a seed that has found it, which `likely_seeds` tries before it searches: where the protocol or the
scenarios have changed, that costs one seed more."""


def likely_seeds(name: str, seeds: range = range(SEEDS)) -> Iterator[int]:
    """These seeds, one that has found the fault before them."""
    if FOUND_BY.get(name, -1) in seeds:
        yield FOUND_BY[name]
    yield from seeds


def first_seed(name: str, seeds: Iterable[int] = range(SEEDS)) -> tuple[int | None, str]:
    """The first of these seeds that finds a fault, and what it says; None if none does."""
    with FAULTS[name].planted():
        for seed in seeds:
            try:
                run_seed(seed)
            except Violation as violation:
                return seed, str(violation)
            except Exception as error:
                return seed, f"seed {seed}: {type(error).__name__}: {error}"
    return None, "not found"


def main(names: list[str]) -> None:
    """Finds the first seed of each fault."""
    with ProcessPoolExecutor(2) as pool:
        tasks = {pool.submit(first_seed, name): name for name in names}
        for task in as_completed(tasks):
            seed, what = task.result()
            print(f"{seed!s:>5}  {tasks[task]}\n       {what.splitlines()[0][:150]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAULTS))
