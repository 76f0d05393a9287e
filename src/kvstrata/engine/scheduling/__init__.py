"""Who runs in the next step, on which blocks. No torch: it works on numbers alone."""
