"""What a user wants of a run: its settings and its program."""
