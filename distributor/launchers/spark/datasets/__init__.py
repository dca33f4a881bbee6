"""DataFrames as the chunks of each node."""
