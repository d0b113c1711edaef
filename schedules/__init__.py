"""The schedule library: one family per file, written in the schedule language, with formula and source."""
