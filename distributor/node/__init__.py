"""What runs on each machine of a run: an agent, its ranks, and the environment they run in."""
