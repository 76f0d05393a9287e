"""Measurements against stated goals. Each benchmark returns a `Report`."""
