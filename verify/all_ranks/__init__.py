"""Proofs about a schedule for every number of ranks: its source as a symbolic program, and induction over its loops."""
