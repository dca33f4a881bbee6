"""Spark as this package uses it: sessions, plans, jobs and errors."""
