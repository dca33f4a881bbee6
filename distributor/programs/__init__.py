"""What ranks run: the user's program, modules and environment."""
