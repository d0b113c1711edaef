"""Maximum flow and minimum cut in exact integers (Dinic), and the cut condition of Edmonds' theorem.

Edmonds (1973): out-trees with root distribution x pack into link capacities c iff for every set S of nodes with an
endpoint in it, c(links into S) + x(S) >= 1. Switches that conserve flow (and do not copy) can be split off
(Mader 1982; Bang-Jensen, Frank, Jackson 1995), which leaves capacities between endpoints only.
"""

from __future__ import annotations

from collections.abc import Sequence

Arc = tuple[int, int]


class ResidualGraph:
    """Nodes 0..n-1 and arcs with integer capacities; the nodes that were merged are the source of every flow.

    What arcs from merged nodes bring to a node is one number, its supply, and searches start at the sink. So checks of
    many sinks one after the other cost what lies near each of them, where supplies are near, and not the whole graph
    each time.
    """

    def __init__(self, n_nodes: int, arcs: Sequence[Arc], capacities: Sequence[int] | None = None) -> None:
        self.n_nodes = n_nodes
        self.arcs_at: list[list[int]] = [[] for _ in range(n_nodes)]  # of residual arcs: 2a is arc a, 2a + 1 goes back
        self.ends: list[int] = []  # ends[each] is the head of residual arc `each`, ends[each ^ 1] its tail
        self.entering: list[list[int]] = [[] for _ in range(n_nodes)]  # residual arcs that may have room
        for tail, head in arcs:
            self.arcs_at[tail].append(len(self.ends))
            self.arcs_at[head].append(len(self.ends) + 1)
            self.entering[head].append(len(self.ends))
            self.ends += (head, tail)
        self.left: list[int] = []
        self.changed: dict[int, int] = {}  # residual arcs of the last flow, and their room before
        self.taken: dict[int, int] = {}  # nodes of the last flow, and their supply before
        self.set_capacities([0] * len(arcs) if capacities is None else capacities)

    def set_capacities(self, capacities: Sequence[int]) -> None:
        """Other capacities for the same arcs; nothing is merged."""
        self._undo()
        self.left = [0] * len(self.ends)
        self.left[::2] = capacities
        self.supply = [0] * self.n_nodes
        self.merged: set[int] = set()

    def merge(self, node: int) -> None:
        """Makes `node` a part of the source."""
        self._undo()
        self.merged.add(node)
        for arc in self.arcs_at[node]:
            self.supply[self.ends[arc]] += self.left[arc]
            self.left[arc] = 0

    def flow_to(self, sink: int, limit: int) -> int:
        """The maximum flow from the source to `sink`, which is not a part of it, capped at `limit`."""
        self._undo()
        total = 0
        while total < limit:
            level = self._levels(sink)
            if level is None:
                break
            total += self._block(sink, limit - total, level)
        return total

    def _undo(self) -> None:
        """Takes the last flow back."""
        for arc, before in self.changed.items():
            self.left[arc] = before
            if arc & 1:
                self.entering[self.ends[arc]].pop()
        for node, before in self.taken.items():
            self.supply[node] = before
        self.changed, self.taken = {}, {}

    def _levels(self, sink: int) -> list[int] | None:
        """Distances to the sink, -1 if unknown; the search ends at the level of the nearest supply. None if no supply
        reaches the sink."""
        level = [-1] * self.n_nodes
        level[sink] = 0
        todo, met = [sink], self.supply[sink] > 0
        left, ends, supply = self.left, self.ends, self.supply
        while todo and not met:
            found: list[int] = []
            for node in todo:
                for arc in self.entering[node]:
                    tail = ends[arc ^ 1]
                    if level[tail] < 0 and left[arc] > 0:
                        level[tail] = level[node] + 1
                        found.append(tail)
                        met = met or supply[tail] > 0
            todo = found
        return level if met else None

    def _block(self, sink: int, most: int, level: list[int]) -> int:
        """Sends what the shortest paths carry, up to `most`; returns the amount.

        From the sink on, a node asks the nodes before it for what it still lacks, one after the other, and none again
        that had too little: every arc is passed about once, however many paths it is on.
        """
        left, ends, supply = self.left, self.ends, self.supply
        position = [0] * self.n_nodes
        last = max(level)
        asked = [[sink, most, 0, -1]]  # node, what it was asked for, what it has of that, the arc on
        while True:
            frame = asked[-1]
            node, want = frame[0], frame[1] - frame[2]
            if want and supply[node]:
                had = min(want, supply[node])
                self.taken.setdefault(node, supply[node])
                supply[node] -= had
                frame[2] += had
                want -= had
            arcs = self.entering[node]
            at = position[node]
            while want and at < len(arcs) and level[node] < last:
                arc = arcs[at]
                if left[arc] > 0 and level[ends[arc ^ 1]] == level[node] + 1:
                    asked.append([ends[arc ^ 1], min(want, left[arc]), 0, arc])
                    break
                at += 1
            position[node] = at
            if asked[-1] is not frame:
                continue
            _, wanted, had, arc = asked.pop()
            if not asked:
                return had
            before = asked[-1]
            if had:
                self._send(arc, had)
                before[2] += had
            if had < wanted:
                position[before[0]] += 1

    def _send(self, arc: int, amount: int) -> None:
        back = arc ^ 1
        if arc not in self.changed:
            self.changed[arc], self.changed[back] = self.left[arc], self.left[back]
            self.entering[self.ends[back]].append(back)
        self.left[arc] -= amount
        self.left[back] += amount

    def reaching(self, sink: int) -> set[int]:
        """Nodes with a residual path to `sink`: the smallest S that a maximum flow saturates."""
        seen, todo = {sink}, [sink]
        while todo:
            for arc in self.entering[todo.pop()]:
                tail = self.ends[arc ^ 1]
                if tail not in seen and self.left[arc] > 0:
                    seen.add(tail)
                    todo.append(tail)
        return seen

    def beyond(self) -> set[int]:
        """Nodes without a residual path from the source: the largest S that a maximum flow saturates."""
        seen = {*self.merged, *(node for node, supply in enumerate(self.supply) if supply)}
        todo = list(seen)
        while todo:
            for arc in self.arcs_at[todo.pop()]:
                head = self.ends[arc]
                if head not in seen and self.left[arc] > 0:
                    seen.add(head)
                    todo.append(head)
        return set(range(self.n_nodes)) - seen


class CutFinder:
    """Finds narrow cuts of one graph again and again; endpoints are nodes 0..`n_endpoints`-1."""

    def __init__(self, n_nodes: int, arcs: Sequence[Arc], n_endpoints: int) -> None:
        self.source, self.n_endpoints = n_nodes, n_endpoints
        every = [*arcs, *((n_nodes, v) for v in range(n_endpoints))]
        self.graph = ResidualGraph(n_nodes + 1, every)

    def find(
        self,
        capacities: Sequence[int],
        roots: Sequence[int],
        need: int,
        *,
        alike: Sequence[int] | None = None,
        contract: bool = True,
    ) -> list[tuple[int, frozenset[int]]]:
        """Sets S with an endpoint in them and capacities(into S) + roots(S) < `need`, each with that sum; the worst
        first.

        None are found iff every S has enough. With `contract`, an endpoint that was checked is merged with the source:
        sets that contain it are done, and the rest is much faster. With `alike`, endpoints of the same number are
        exchanged by automorphisms that keep `capacities` and `roots`: one of them stands for all.
        """
        graph = self.graph
        graph.set_capacities([*capacities, *roots])
        groups: dict[int, list[int]] = {}
        for v in sorted(range(self.n_endpoints), key=lambda v: (-roots[v], v)):
            groups.setdefault(v if alike is None else alike[v], []).append(v)
        graph.merge(self.source)
        found: dict[frozenset[int], int] = {}
        for group in groups.values():
            flow = graph.flow_to(group[0], need)
            if flow < need:
                found[frozenset(graph.reaching(group[0]))] = flow
                found[frozenset(graph.beyond())] = flow
            for v in group if contract else ():
                graph.merge(v)
        return sorted(((flow, nodes) for nodes, flow in found.items()), key=lambda each: (each[0], sorted(each[1])))


def narrow_cuts(
    n_nodes: int,
    arcs: Sequence[Arc],
    capacities: Sequence[int],
    roots: Sequence[int],
    need: int,
    *,
    contract: bool = True,
) -> list[tuple[int, frozenset[int]]]:
    """What `CutFinder.find` finds in one graph."""
    return CutFinder(n_nodes, arcs, len(roots)).find(capacities, roots, need, contract=contract)
