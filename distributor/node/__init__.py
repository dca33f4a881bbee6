"""On each machine of a run: its agent, its ranks and their environment."""
