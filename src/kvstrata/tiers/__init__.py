"""Where bytes rest: host memory, a file system, an object store, a key-value server."""
