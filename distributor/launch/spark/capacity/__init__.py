"""Whether a cluster has room for a run, and why not: slots, memory, workers."""
