"""Runs on the executors of a Spark session, as their driver sees them."""
