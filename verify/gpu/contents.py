"""What the cells of all GPUs hold after the ops have run: which chunks of which inputs were added up, and how.

A value is a node: an input chunk, or a sum of nodes. Equal nodes are one node, and a sum of two does not depend on
their order, as rounding does not; so GPUs whose result is the same node have the same bits. Sums of three and more are
added up in an order that depends on the size of the call: they are equal only if all operands are, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optcc.verify.gpu.operations import MESSAGE, GpuOp

NOTHING = -1
"""What a cell holds that was never written, and every sum with it."""
Leaf = tuple[int, int]
"""GPU and chunk of its input."""


@dataclass(slots=True)
class SumNodes:
    """All nodes made so far."""

    _number: dict[tuple[object, ...], int] = field(default_factory=dict)
    _operands: list[tuple[int, ...]] = field(default_factory=list)
    _leaf: list[Leaf | None] = field(default_factory=list)
    made_by: list[int] = field(default_factory=list)
    """For each node the op that has made it first, -1 for an input."""

    def leaf(self, leaf: Leaf) -> int:
        """The node of an input chunk."""
        return self._node(("leaf", *leaf), (), leaf, -1)

    def add(self, operands: Sequence[int], op: int) -> int:
        """The sum of some nodes; a sum of one is that node."""
        if NOTHING in operands:
            return NOTHING
        if len(operands) == 1:
            return operands[0]
        key = tuple(sorted(operands)) if len(operands) == 2 else tuple(operands)
        return self._node(("sum", *key), key, None, op)

    def _node(self, key: tuple[object, ...], operands: tuple[int, ...], leaf: Leaf | None, op: int) -> int:
        number = self._number.setdefault(key, len(self._leaf))
        if number == len(self._leaf):
            self._operands.append(operands)
            self._leaf.append(leaf)
            self.made_by.append(op)
        return number

    def counts(self, node: int) -> dict[Leaf, int]:
        """How often each input chunk is in a node. Large counts are not expanded: nodes are added up once each."""
        order, seen = [], {node}
        stack = [node]
        while stack:
            each = stack.pop()
            order.append(each)
            for operand in self._operands[each]:
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        weight = dict.fromkeys(order, 0)
        weight[node] = 1
        found: dict[Leaf, int] = {}
        for each in sorted(order, reverse=True):  # operands have lower numbers
            leaf = self._leaf[each]
            if leaf is not None:
                found[leaf] = found.get(leaf, 0) + weight[each]
            for operand in self._operands[each]:
                weight[operand] += weight[each]
        return found

    def first_sum_with(self, node: int, leaf: Leaf, times: int) -> int:
        """The op that made the smallest sum in `node` that holds `leaf` at least `times` times; -1 if no sum does."""
        stack, best = [node], -1
        while stack:
            each = stack.pop()
            if self.made_by[each] >= 0 and self.counts(each).get(leaf, 0) >= times:
                best = self.made_by[each]
                stack = list(self._operands[each])
        return best


@dataclass(slots=True)
class GpuContents:
    """The node in each cell, and the op that wrote it last (-1: none has)."""

    nodes: SumNodes
    cells: list[int]
    writer: list[int]
    empty_reads: list[tuple[int, int]] = field(default_factory=list)
    """Ops that read a cell which nothing had written, with the cell."""

    def run(self, ops: Sequence[GpuOp]) -> None:
        """Runs all ops, which have no race, in their order."""
        messages: dict[int, list[int]] = {}
        for index, op in enumerate(ops):
            columns = []
            for region in op.operands:
                columns.append(messages.pop(op.received) if region == MESSAGE else self.cells[region[0] : region[1]])
                if region != MESSAGE and NOTHING in columns[-1]:
                    first = region[0] + columns[-1].index(NOTHING)
                    if self.writer[first] < 0:
                        self.empty_reads.append((index, first))
            values = [self.nodes.add(operands, index) for operands in zip(*columns, strict=True)]
            if op.sends:
                messages[index] = values
            for first, last in op.writes:
                self.cells[first:last] = values
                self.writer[first:last] = [index] * (last - first)
