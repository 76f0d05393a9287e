"""The embedded engine with its cache thrown away and restored, measured: what `demo` shows."""
