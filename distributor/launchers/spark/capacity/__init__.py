"""Whether a cluster has room for a run."""
