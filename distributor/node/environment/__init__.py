"""The interpreter and packages that ranks run with, made ready on a node."""
