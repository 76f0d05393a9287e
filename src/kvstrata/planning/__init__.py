"""The decisions, as pure functions from values to plans. Nothing here does I/O or knows a tier."""
