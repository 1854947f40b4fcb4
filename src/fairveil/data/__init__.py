"""Data: who holds what. Loaders, shifts between clients, partitions, and the federation they make."""
