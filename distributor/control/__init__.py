"""The driver: one loop for the attempts of a run, and one for each attempt, with any launcher."""
