"""Pickled programs for ranks, and their outcomes: values and failures."""
