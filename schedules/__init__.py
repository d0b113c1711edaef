"""The schedule library: one family a file, written in the schedule language, with formula and source."""
