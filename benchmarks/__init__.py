"""How fast fairveil is, measured beside what people use today. Not tests: `python -m benchmarks` runs them all."""
