"""The run-time: executes a verified `Plan` on real buffers, rank by rank.

    state        one rank's protocol as a pure transition table: no I/O, no clock, no data
    engine       `Engine`, `PersistentPlan`, `Handle`, `Executor`: any number of runs; the only place that waits
    communicator `Communicator`: collectives on arrays, for programs
    agree        all ranks agree on what they are about to run before the first byte
    kernels      reductions and copies on typed arrays
    check        inputs whose result is exact in every order, and the count of wrong elements
    transport    the two small protocols `Transport` and `Clock`
    transports   `loopback` (threads in one process, shaped ports), `mpi`, `tcp` (several NICs, failover), and `sim`
                 (unreliable rails in one process, to try failover)
    launch       how ranks meet over MPI, a file or an address, and which NICs they use
    conformance  the suite that every transport passes
    samples      small plans made by hand, to try transports and executors with

A program has a `Communicator`; `Executor` runs one plan. `run_ranks` gives them the ranks of a loopback,
`MpiTransport` or `TcpTransport` a process of `mpirun`.
"""
