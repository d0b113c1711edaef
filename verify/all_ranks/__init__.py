"""Proofs about a schedule for every number of ranks: symbolic execution of its source, and induction over its loops."""
