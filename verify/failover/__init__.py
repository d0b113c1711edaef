"""Proofs about the failover table: exploration of its states, and inductive invariants."""
