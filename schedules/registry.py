"""The library: every schedule by its name."""

from __future__ import annotations

from optcc.dsl import Definition
from optcc.schedules.all_to_all import (
    direct_all_to_all,
    direct_all_to_all_v,
    direct_gather,
    direct_scatter,
    matched_all_to_all,
    matched_all_to_all_v,
)
from optcc.schedules.direct import direct
from optcc.schedules.double_tree import double_binary_tree
from optcc.schedules.fair_optimum import shares
from optcc.schedules.hierarchical import hierarchical
from optcc.schedules.logarithmic import bruck, rabenseifner, recursive_doubling
from optcc.schedules.optcc import optcc
from optcc.schedules.optimal import optimal
from optcc.schedules.other_collectives import (
    binary_tree_broadcast,
    binary_tree_reduce,
    chain_broadcast,
    chain_reduce,
    ring_all_gather,
    ring_reduce_scatter,
)
from optcc.schedules.r2ccl import r2ccl_allreduce, r2ccl_balance, r2ccl_recursive
from optcc.schedules.rank_order import rank_order, rank_order_reduce_scatter
from optcc.schedules.ring import bidirectional_ring, ring
from optcc.schedules.stragglar import stragglar

_ALLREDUCE = (
    *(ring, bidirectional_ring, direct, recursive_doubling, rabenseifner, double_binary_tree, hierarchical),
    *(r2ccl_balance, r2ccl_allreduce, r2ccl_recursive, optcc, stragglar, optimal, shares, rank_order),
)
_HALVES = (
    *(ring_reduce_scatter, rank_order_reduce_scatter, ring_all_gather, bruck),
    *(chain_broadcast, chain_reduce, binary_tree_broadcast, binary_tree_reduce),
)
_EXCHANGES = (
    *(direct_all_to_all, matched_all_to_all, direct_all_to_all_v, matched_all_to_all_v),
    *(direct_gather, direct_scatter),
)
SCHEDULES: dict[str, Definition] = {definition.name: definition for definition in (*_ALLREDUCE, *_HALVES, *_EXCHANGES)}
