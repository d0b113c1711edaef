"""Lower bounds on the time of a collective: closed forms, linear programs over cuts, and certificates that replay."""
