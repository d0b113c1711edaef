"""Observation of a running job: what each rank is doing, what it did last, and who keeps whom waiting.

page       the memory that a rank writes without a lock and other processes read: numbers, a status, a ring of events
recorder   the flight recorder: what the engine writes there at each collective and each long message
observer   a rank's own: refreshes its status, keeps rare events, dumps on failures, signals and requests
dump       what was read of a page, as a file
jobs       the pages of the jobs on this host
clocks     the clocks of several hosts, aligned by messages
waiting    who waits for whom, and who is at the end of it
explain    what happened first: dumps of all ranks to one paragraph
metrics    the same numbers in the OpenMetrics format
"""
