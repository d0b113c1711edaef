"""Proofs about the failover table.

    configurations   small cases, and which faults may happen in them
    observer         what each end has done, and the rules that a step must keep
    state_space      states, packed, and the moves between them: the two ends and the network
    exploration      a search through all states of a configuration; counterexamples
    induction        invariants and a relation for each row, proved for any number of chunks
    encoding         these relations and invariants, evaluated on what explorations meet

The table itself is `optcc.failover`.
"""
