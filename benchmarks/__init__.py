"""Benchmarks of this project beside other launchers: ``python -m benchmarks``."""
