"""Values and arithmetic: the standard library alone; no I/O, no threads, no clock, no torch."""
