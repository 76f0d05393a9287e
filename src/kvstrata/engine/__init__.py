"""A small, real inference engine for hybrid models, with the caches that offloading plugs into."""
