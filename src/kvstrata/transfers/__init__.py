"""Moves bytes between an engine's caches and host memory; decides nothing. Needs torch."""
