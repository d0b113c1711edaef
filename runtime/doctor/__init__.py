"""What this host has, and what of it is misconfigured, for running collectives: `optcc doctor`.

    system      what checks may look at: `System`; `Host` is this machine
    finding     `Finding`, what a check reports, and `Need`, the job that the host is to take part in
    examine     all checks over a system
    the others  the checks, one area each, as `Finding.area` calls it; packages also has that of the cache

Checks are functions of the `System` that they are handed and of nothing else: files by path, programs by what they
print, pieces of Python by what they print. So a test hands in a system that is wrong in one way. Nothing is changed,
and everything is bounded in time.
"""
