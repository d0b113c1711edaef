"""Taps: chunks of running collectives, copied or condensed into shared memory and drained by another process.

Theory of operation.

Parties. A *rank* runs collectives. A *tap* (`policy`) says of which collectives, stages, segments and ranks which
chunks are taken at which point, as what (bytes, a sample, norms, ...), how often, and what happens if there is no room.
A *drain* is a process on the rank's host that takes the records out and gives them to sinks. A rank has one ring and
any number of taps; a ring has one drain at a time.

Points. `input` and `output` are the whole arrays of a rank at the beginning and at the end of a run. Of each transfer,
`sent` is what its source hands to the transport, `arrived` what the transport has put into a slot at its destination,
and `result` what the destination holds after it has reduced or copied. A point is passed by exactly one action of
exactly one rank, so (plan, run, point, transfer) is a key: nothing depends on the order in which records come. Plans
are numbered by the order in which their ranks agree on them and runs by the order of each plan's runs, both the same at
all ranks; a rank that was tapped later has the same numbers.

Memory (`ring`). One file for each rank beside its status page:

    0         magic, length of the identity, capacity
    64        identity, JSON, written once
    4 KiB     words of 8 bytes: head, tail, counters; each has one writer, and is written by one store
    8 KiB     the ring: blocks of 64-byte granularity, each in one piece; where one would not fit before the end of the
              memory, a block of padding fills the rest

    block     head of 64 B: state, length, layout, plan, run, ...
              table: for each record the time at which it was taken, 0 if it was not
              payload: the records, at the offsets that the layout says

What a tap takes of a run is known before the run: the plan has the size of every chunk. The *layout* (`layout`) of a
tap and a plan lists the records with their offsets; it is made once, and written once to a file beside the ring.

A run. When a run is started, each tap that wants it reserves the space of all its records at once, or none. So nothing
is looked for, waited for or refused while the collective is under way: a record is taken by a store into its place,
whatever the order. When the run is over its block is marked as done. Blocks of runs that overlap are all open at a
time; the drain takes them in the order of reservation, each once it is done.

Invariants. (1) tail <= head <= tail + capacity; the rank alone moves the head, the drain alone the tail. (2) A block is
written before the head includes it, and is marked done after its last record. (3) For each tap and run that its policy
selects: records taken + records dropped = records of the layout; the counters are of the rank, so that they are exact
whatever becomes of the drain. (4) The rank never waits for the drain but where a tap says `block`: before a run, not
within one, with all other runs of the rank going on, for `block_s` at most, and only while the drain is alive.

Hard cases.
- Full: `drop` leaves the whole run out; `sample` takes every 2nd, 4th, ... record, whatever fits, and counts the rest;
  `block` waits as in (4), then drops. A run that needs more than the whole ring never fits.
- Budgets: bytes for each run, and the share of time that taking records may cost a rank since the tap was attached. The
  time is known only when it has been spent, so a run may exceed it; the next ones are left out until it is met again.
- The drain is killed: the tail stands still, the ring fills, runs are dropped and counted, at the cost of a comparison.
  A record leaves the ring when a sink has accepted it; a drain that is started again goes on with the next.
- The rank is killed, or its job fails, in the middle of a run: the ring stays. The drain sees that the process has
  ended or that the ring was closed, and takes what the open blocks have; what was not taken has no time in the table.
- Policies change while the job runs: they are read when a run is started; layouts are numbered and never change, and
  each block names its own. An operator writes them to a file (`control`) that ranks look at ten times a second.
- Files in shared memory may be torn, truncated or another's: the drain believes only files of its own user, and checks
  every number against the length of the file.

GPUs (`on_device`). Chunks of arrays in a GPU's memory are copied to page-locked memory beside the collective, and
condensed once they are there; nothing waits for it. A run for which there is no such memory is counted as `unseen`.

Not here: point-to-point messages, which have no plan.

policy        what is taken
condense      chunks to records, and back
layout        the records of a plan at a rank
ring          the shared memory
attached      the engine's side
on_device     where the arrays are on a GPU
control       policies of an operator, and files of a job
records       what a drain reads
drain         rings to sinks
sinks         Parquet, Arrow, .npz, a callback
stages        the values and contributors of every stage, from the plan alone
findings      wrong transfers, the ranks that NaNs come from, statistics
"""
