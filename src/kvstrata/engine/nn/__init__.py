"""The parts that models are built from: sharded weights, layers with a cache, arithmetic."""
