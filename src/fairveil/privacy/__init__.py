"""Everything that prices, bounds and noises what leaves a client."""
