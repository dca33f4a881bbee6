"""Spark DataFrames as arguments of a run, and their rows as chunks on the way to the ranks."""
