"""Maximum flow and minimum cut in exact integers (Dinic), and the cut condition of Edmonds' theorem.

Edmonds (1973): out-trees with root distribution x pack into link capacities c iff for every set S of nodes with an
endpoint in it, c(links into S) + x(S) >= 1. Switches that conserve flow (and do not copy) can be split off
(Mader 1982; Bang-Jensen, Frank, Jackson 1995), which leaves capacities between endpoints only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Arc = tuple[int, int]


class ResidualGraph:
    """Nodes 0..n-1 and arcs with integer capacities; `flow_to` can be called repeatedly."""

    def __init__(self, n_nodes: int, arcs: Sequence[Arc], capacities: Sequence[int]) -> None:
        self.n_nodes = n_nodes
        self.arcs_at: list[list[int]] = [[] for _ in range(n_nodes)]
        self.head: list[int] = []
        self.capacity: list[int] = []
        for (tail, head), capacity in zip(arcs, capacities, strict=True):
            self.arcs_at[tail].append(len(self.head))
            self.arcs_at[head].append(len(self.head) + 1)
            self.head += (head, tail)
            self.capacity += (capacity, 0)

    def flow_to(self, sink: int, sources: Iterable[int], limit: int) -> tuple[int, list[int]]:
        """The maximum flow from `sources` to `sink`, capped at `limit`, and the residual capacity of each arc."""
        left = list(self.capacity)
        starts = list(sources)
        total = 0
        while total < limit:
            level = self._levels(starts, sink, left)
            if level[sink] < 0:
                break
            position = [0] * self.n_nodes
            for start in starts:
                while total < limit and (sent := self._push(start, sink, limit - total, level, position, left)):
                    total += sent
        return total, left

    def _levels(self, starts: list[int], sink: int, left: list[int]) -> list[int]:
        """Distances from the nearest source, -1 if unreachable; the search ends at the sink's level."""
        level = [-1] * self.n_nodes
        for start in starts:
            level[start] = 0
        todo = starts
        while todo and level[sink] < 0:
            found: list[int] = []
            for node in todo:
                for arc in self.arcs_at[node]:
                    head = self.head[arc]
                    if level[head] < 0 and left[arc] > 0:
                        level[head] = level[node] + 1
                        found.append(head)
            todo = found
        return level

    def _push(self, start: int, sink: int, most: int, level: list[int], position: list[int], left: list[int]) -> int:
        """Augments along one shortest path; returns the amount, zero if there is none."""
        path: list[int] = []
        node = start
        while node != sink:
            arcs = self.arcs_at[node]
            while position[node] < len(arcs):
                arc = arcs[position[node]]
                if left[arc] > 0 and level[self.head[arc]] == level[node] + 1:
                    break
                position[node] += 1
            else:
                if not path:
                    return 0
                node = self.head[path.pop() ^ 1]
                position[node] += 1
                continue
            path.append(arc)
            node = self.head[arc]
        sent = min(most, min(left[arc] for arc in path))
        for arc in path:
            left[arc] -= sent
            left[arc ^ 1] += sent
        return sent

    def reaching(self, sink: int, left: list[int]) -> set[int]:
        """Nodes with a residual path to `sink`: the smallest S that a maximum flow saturates."""
        seen, todo = {sink}, [sink]
        while todo:
            for arc in self.arcs_at[todo.pop()]:
                tail = self.head[arc]
                if tail not in seen and left[arc ^ 1] > 0:
                    seen.add(tail)
                    todo.append(tail)
        return seen

    def beyond(self, sources: Iterable[int], left: list[int]) -> set[int]:
        """Nodes without a residual path from `sources`: the largest S that a maximum flow saturates."""
        seen = set(sources)
        todo = list(seen)
        while todo:
            for arc in self.arcs_at[todo.pop()]:
                head = self.head[arc]
                if head not in seen and left[arc] > 0:
                    seen.add(head)
                    todo.append(head)
        return set(range(self.n_nodes)) - seen


def narrow_cuts(
    n_nodes: int,
    arcs: Sequence[Arc],
    capacities: Sequence[int],
    roots: Sequence[int],
    need: int,
    *,
    contract: bool = True,
) -> list[tuple[int, frozenset[int]]]:
    """Sets S with an endpoint in them and capacities(into S) + roots(S) < `need`, each with that sum; the worst first.

    Endpoints are nodes 0..len(roots)-1. None are found iff every S has enough. With `contract`, an endpoint that was
    checked is merged with the source: sets that contain it are done, and the rest is much faster.
    """
    p = len(roots)
    graph = ResidualGraph(n_nodes + 1, [*arcs, *((n_nodes, v) for v in range(p))], [*capacities, *roots])
    sources = [n_nodes]
    found: dict[frozenset[int], int] = {}
    for endpoint in sorted(range(p), key=lambda v: (-roots[v], v)):
        flow, left = graph.flow_to(endpoint, sources, need)
        if flow < need:
            found[frozenset(graph.reaching(endpoint, left))] = flow
            found[frozenset(graph.beyond(sources, left))] = flow
        if contract:
            sources.append(endpoint)
    return sorted(((flow, nodes) for nodes, flow in found.items()), key=lambda each: (each[0], sorted(each[1])))
