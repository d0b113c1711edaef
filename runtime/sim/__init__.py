"""The protocol of the TCP transport in simulated time: hosts, NICs and connections that fail, from a seed.

clock     events in simulated time
stream    a connection as the kernel keeps it: buffers, segments, acknowledgements, retransmission, windows
network   NICs with rates, delays and faults; which connections join which hosts
host      the driver: one rank's `Endpoint` (the very class that TCP runs) on simulated connections
scenario  a seed makes hosts, messages and faults
swarm     runs a scenario, and checks every promise
recorder  what befalls the ranks: a story, and counts
"""
