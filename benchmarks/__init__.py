"""What this project's speed is, measured beside its peers: ``python -m benchmarks``."""
