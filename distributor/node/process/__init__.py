"""Spawning, supervising and killing processes; nothing here knows what a rank runs."""
