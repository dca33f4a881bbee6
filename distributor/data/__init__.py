"""Spark DataFrames and Parquet files as training data: each rank reads its share."""
