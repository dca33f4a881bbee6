"""The datasets of a run: Spark computes them, and distributes their rows to the nodes."""
