"""The protocol between the ranks of a job, without I/O: theory of operation.

Parties. Each rank has one `Endpoint`; a driver (`optcc.runtime.transports.tcp`, `optcc.runtime.sim`) gives it bytes,
events and the time, and carries out what it asks for. Between two ranks there is a *direction* each way: `Outbound`
at the source, `Inbound` at the destination. A direction has *rails*, pairs of NICs, and the source keeps one
connection on each rail. It carries *channels*, FIFO streams of messages, which are cut into *chunks*.

Messages (`frames`). Towards the destination: data (a chunk) and change (proposal of an epoch). Back: state (epoch,
chunks delivered, slots posted). Both ways: gone, back, probe, doubt, rate, bye. A state is cumulative, so any later
one replaces it; control frames go over every connection of a pair, and receiving one twice does no harm.

Each channel executes the failover table (`optcc.failover`) at both ends; the proofs about it are in
`optcc.verify.failover`. The rails of the table are virtual: the sender maps a virtual rail to a rail of the pair when
a chunk goes out, and tells the table which virtual rails are up. The rest of this package decides when a rail is up,
which rail carries what, and when waiting is useless.

Invariants.
- A chunk is sent when its slot is posted (or it is eager: at most `EARLY_CHUNKS_MAX` a channel may come before their
  slots), and kept until it is acknowledged. A chunk is delivered once; a slot that was delivered is never written
  again.
- A virtual rail is up in the table exactly while the rail that it stands for has a connection that is not avoided. A
  channel is stalled only while no rail of its pair is used.
- A virtual rail on which something is out (a chunk, or the proposal of an epoch) is not mapped to another rail,
  except by the retransmission timer, which sends it again.
- What was last reported over a connection that is lost or avoided is reported again over another one, or over the
  next one.
- Memory is that of the posted views, one chunk a connection for second copies, and copies of eager messages.

Hard cases, and why each ends well.
- *A connection breaks.* Chunks that were out on it go out elsewhere; states are repeated; the source dials again, at
  once if a connection that had lasted was reset, and at growing intervals after that; the other end is told (gone), for
  it may not notice. If no other connection is up then, the next one tells it: a source whose bytes were all
  acknowledged by the peer's kernel would wait for ever.
- *Nobody says that a NIC has failed.* The kernel's counters do (`liveness`): half-way to the verdict the connection
  is suspected and avoided (`suspicion`), the verdict closes it. If it was only slow, the second copy of a chunk is
  dropped.
- *A chunk comes twice at once.* The second copy goes beside the slot; the first complete one counts.
- *All virtual rails of a channel stand for one rail, and that is lost.* They are mapped anew (`Outbound._remap`).
- *A rank leaves.* It waits until its peers have acknowledged everything and have a connection on which a probe was
  acknowledged (`Endpoint.owes_nothing`), then says bye with its last states on every connection. A closed socket
  answers with a reset, which discards what the peer has sent and not what it can still read. A bye after a failure is a
  lost rank (`membership`). So are refused connections of a rank that is waited for; if it is not, it may have left, and
  its bye was lost.
- *A rank computes for long.* Its kernel acknowledges for it, and answers probes of a closed window; time in which this
  rank did not look is not counted.
- *No rail of a pair is left.* The source reaches the peer through other ranks (`detour`), over a connection that is one
  more rail of the pair, used while no other is; ranks between pass on bytes (`relay`), and stay until both ends leave.
- *No rail ever reached a peer.* Who waits for it dials it, though the peer should, and so finds out (`Inbound.tick`).

Where things are: `liveness` and `suspicion` judge connections, `outbound` dials and maps rails, `inbound` suppresses
duplicates, `reports` defers states, `nic_meter` and `rates` measure NICs, `membership` declares ranks lost,
`detour` and `relay` lead around lost rails, `regrouping` says who goes on without lost hosts, `exchange` is allgather
and barrier, `endpoint` is the driver's interface.
"""
