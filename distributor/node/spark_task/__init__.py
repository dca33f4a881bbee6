"""One node inside a Spark barrier task, and its connection to the driver."""
