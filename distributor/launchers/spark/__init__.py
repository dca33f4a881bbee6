"""The launcher for Spark's executors."""
