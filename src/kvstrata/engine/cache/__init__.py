"""The paged KV cache: what layers need, how blocks are shared out, what prefixes are kept."""
