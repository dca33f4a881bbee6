"""What starts the nodes of a run."""
