"""GOAL: the schedule language of LogGOPSim (Hoefler, Schneider and Lumsdaine, HPDC 2010) and of ATLAHS (SC 2025).

A rank of the file is an endpoint of the topology, that is a server: what its GPUs send to other servers goes through
the server's ports; what they send each other and local operations are `calc 0`. For each endpoint, all that it does,
and then what waits for what:

    s7: send 4096b to 2 tag 7 cpu 3 nic 0     transfer 7 leaves
    r7: recv 4096b from 1 tag 7 cpu 3 nic 0   transfer 7 arrives
    c7: calc 0 cpu 3                          transfer 7 stays on the endpoint
    s8 requires r7                            s8 starts when r7 is done
    r9 irequires r7                           r9 is posted once r7 is
    k9: send 1b to 1 tag 109 cpu 3 nic 1      the slot for transfer 9 is free
    q9: recv 1b from 2 tag 109 cpu 3 nic 1    its sender hears of it
    o5: send 1b to 2 tag 205 cpu 254 nic 1    another transfer, before 5 at its in port, has begun
    w5: recv 1b from 0 tag 205 cpu 254 nic 1  the sender of 5 hears of it

That a slot is free is a message of one byte, which LogGOPSim charges nothing. It goes over a NIC of its own, as it must
not queue behind data; its tag is that of the transfer plus the number of transfers. Messages that wait at a port
are served in the order in which they began; so that this is ours, one is told when the one before it has begun, which
takes no time either.

What the simulators ask for (each of these rules broken costs a wrong time or a deadlock): a tag is used once; a chunk
has a `cpu`, the same for its receive and for the send that passes it on, as time flows through the clocks of the CPUs;
a lane's sends are chained by `requires`, its receives by `irequires`; labels are defined before they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from optcc.arrays import Column
from optcc.errors import PlanError, TopologyError
from optcc.plan import Plan
from optcc.timing import Timing
from optcc.topology import Topology

CPUS = 254
"""A `cpu` is a byte, and 256 of them overflow it; one more than these is for what carries no chunk."""
TAGS = 2**32


def write_goal(plan: Plan, topology: Topology, timing: Timing | None = None) -> bytes:
    """`plan` as GOAL text, its ports those of `topology`.

    `timing` is the predicted run with fifo ports, from `optcc.simulate`: what is on its way to one in port at one time
    is served in its order. Without it that order is left to the simulator.

    The simulators know one time per byte. A byte between endpoints of lower rates counts as more bytes: the size of a
    message is multiplied by the best rate of the topology over the lower one of its sender's out and its receiver's in
    rate, and rounded up. With `-L 0 -o 0 -g 0 -O 0 -G 1 -S 2000000000` a tick is then a byte at the best rate. That is
    exact while a port carries one message at a time and the products are whole.

    >>> from optcc.compiler import compile_schedule
    >>> from optcc.schedules.ring import ring
    >>> plan = compile_schedule(ring(n_ranks=2), size_bytes=8)
    >>> print(write_goal(plan, Topology.parse("2@1GB/s,1=500MB/s")).decode().partition("rank 1")[0])
    num_ranks 2
    rank 0 {
    s0: send 8b to 1 tag 0 cpu 0 nic 0
    r1: recv 8b from 1 tag 1 cpu 1 nic 0
    s2: send 8b to 1 tag 2 cpu 1 nic 0
    r3: recv 8b from 1 tag 3 cpu 0 nic 0
    s2 requires s0
    s2 requires r1
    r3 irequires r1
    r3 requires s0
    }
    <BLANKLINE>

    Raises TopologyError if the topology has another number of ranks, PlanError if there are more transfers than tags.
    """
    if topology.n_ranks != plan.n_ranks:
        raise TopologyError(f"topology of {topology.n_ranks} ranks: the plan is for {plan.n_ranks} ranks")
    if 3 * len(plan.transfers) > TAGS:
        rule = f"must be at most {TAGS // 3}, as each one has a tag, its slot another, and its turn a third"
        raise PlanError(f"goal: {len(plan.transfers)} transfers: {rule}")
    return "".join((f"num_ranks {len(topology.servers)}\n", *_endpoints(plan, topology, timing))).encode()


def _endpoints(plan: Plan, topology: Topology, timing: Timing | None) -> Iterator[str]:
    """The block of each endpoint."""
    transfers, server_of = plan.transfers, np.array(topology.rank_server)
    src, dst = server_of[transfers.src], server_of[transfers.dst]
    stays = (src == dst).tolist()
    cpus = _cpus(plan)
    leaves, arrives = _statements(plan, cpus, src, dst, topology)
    recv, send = plan.recv_transfer.tolist(), plan.send_transfer.tolist()
    # By what others know that an instruction has happened: a fused one has when its send has left.
    label = [
        f"{'c' if stays[t] else 's'}{t}" if t >= 0 else f"{'c' if stays[r] else 'r'}{r}"
        for r, t in zip(recv, send, strict=True)
    ]
    after = list(plan.after)
    blocks: list[tuple[list[str], list[str]]] = [([], []) for _ in topology.servers]
    for rank, lane in zip(plan.lane_rank.tolist(), plan.lanes, strict=True):
        lines, waits = blocks[server_of[rank]]
        sent = received = ""
        pending: list[str] = []  # what the instructions issued since the last send of the lane waited for
        for index in lane:
            wanted = [label[earlier] for earlier in after[index]]
            r, t = recv[index], send[index]
            own = ""
            if r >= 0:
                own = f"{'c' if stays[r] else 'r'}{r}"
                lines.append(arrives[r])
                if received:
                    waits.append(f"{own} irequires {received}")
                waits += [f"{own} requires {each}" for each in wanted]
                received = own
            if t < 0:
                pending += wanted
                continue
            leaving = f"{'c' if stays[t] else 's'}{t}"
            if not stays[t]:
                lines.append(leaves[t])
            before = dict.fromkeys((sent, own, *pending, *wanted))
            waits += [f"{leaving} requires {each}" for each in before if each and each != leaving]
            sent, pending = leaving, []
    for freed, t in _slots(plan):
        known = f"{'c' if stays[freed] else 'r'}{freed}"
        if stays[t]:
            blocks[dst[t]][1].append(f"c{t} requires {known}")
            continue
        tag, (cpu, cpu_freed) = len(transfers) + t, (cpus[0][t], cpus[1][freed])
        blocks[dst[t]][0].append(f"k{t}: send 1b to {src[t]} tag {tag} cpu {cpu_freed} nic 1")
        blocks[dst[t]][1].append(f"k{t} requires {known}")
        blocks[src[t]][0].append(f"q{t}: recv 1b from {dst[t]} tag {tag} cpu {cpu} nic 1")
        blocks[src[t]][1].append(f"s{t} requires q{t}")
    for first, t in _turns(timing, src, dst):
        tag = 2 * len(transfers) + t
        blocks[src[first]][0].append(f"o{t}: send 1b to {src[t]} tag {tag} cpu {CPUS} nic 1")
        blocks[src[first]][1].append(f"o{t} irequires s{first}")
        blocks[src[t]][0].append(f"w{t}: recv 1b from {src[first]} tag {tag} cpu {CPUS} nic 1")
        blocks[src[t]][1].append(f"s{t} requires w{t}")
    for index, (lines, waits) in enumerate(blocks):
        yield "\n".join((f"rank {index} {{", *lines, *waits, "}\n"))


def _slots(plan: Plan) -> Iterator[tuple[int, int]]:
    """(transfer that frees a slot once it has been received, the one that lands in that slot next), lane by lane."""
    for lane in plan.lanes:
        received = [index for index in lane if plan.in_channel[index] >= 0]
        for number, index in enumerate(received):
            slots = plan.channels[plan.in_channel[index]].slots
            if number >= slots:
                yield int(plan.recv_transfer[received[number - slots]]), int(plan.recv_transfer[index])


def _turns(timing: Timing | None, src: Column, dst: Column) -> Iterator[tuple[int, int]]:
    """(transfer, the one that its in port takes next) of those that are on their way at one time.

    The second then begins no sooner than the first. That makes nothing wait in a circle: a transfer is told only if its
    last byte leaves after everything has begun that it is told of, directly or by others; and what waits for it in any
    other way begins no sooner than its last byte has left. So along what waits for what, beginnings become later.
    """
    if timing is None:
        return
    order = np.lexsort((timing.start_s, timing.end_s, timing.taken_s, dst))
    order = order[src[order] != dst[order]]
    start, sent = timing.start_s.tolist(), timing.sent_s.tolist()
    earlier, begun = -1, 0.0  # the one before, and when all that it is told of have begun
    for t in order.tolist():
        together = earlier >= 0 and dst[earlier] == dst[t] and src[earlier] != src[t] and start[t] < sent[earlier]
        if together and sent[t] > begun:
            yield earlier, t
            begun = max(begun, start[t])
        else:
            begun = start[t]
        earlier = t


def _cpus(plan: Plan) -> tuple[list[int], list[int]]:
    """For each transfer the CPU of its chunk where it leaves, and where it arrives."""
    transfers = plan.transfers
    _, cpu = np.unique(np.concatenate((transfers.src_offset, transfers.dst_offset)), return_inverse=True)
    cpus = (cpu % CPUS).tolist()
    return cpus[: len(transfers)], cpus[len(transfers) :]


def _statements(
    plan: Plan, cpus: tuple[list[int], list[int]], src: Column, dst: Column, topology: Topology
) -> tuple[list[str], list[str]]:
    """For each transfer what the endpoint that it leaves does, and what the one does at which it arrives."""
    columns = (_sizes(plan.transfers.bytes, src, dst, topology), src.tolist(), dst.tolist(), *cpus)
    leaves, arrives = [], []
    for t, (size, out, in_, cpu_out, cpu_in) in enumerate(zip(*columns, strict=True)):
        leaves.append(f"s{t}: send {size}b to {in_} tag {t} cpu {cpu_out} nic 0")
        arrives.append(
            f"c{t}: calc 0 cpu {cpu_in}" if out == in_ else f"r{t}: recv {size}b from {out} tag {t} cpu {cpu_in} nic 0"
        )
    return leaves, arrives


def _sizes(length: Column, src: Column, dst: Column, topology: Topology) -> list[int]:
    """For each transfer what it counts, in bytes at the best rate."""
    best = max(*topology.out, *topology.in_)
    factor: dict[tuple[int, int], Fraction] = {}
    sizes = []
    for size, out, in_ in zip(length.tolist(), src.tolist(), dst.tolist(), strict=True):
        pair = (out, in_)
        if out != in_ and pair not in factor:
            factor[pair] = best / min(topology.out[out], topology.in_[in_])
        by = factor.get(pair, Fraction(1))
        sizes.append(-(-size * by.numerator // by.denominator))
    return sizes
