"""One node inside a Spark task. No module here imports PySpark when it is imported."""
