"""The agent of a node, which starts, watches and stops the node's ranks.

It is the same on the driver's machine and inside a Spark task (`node.spark_task`). What runs
inside a rank is in `node.worker`.
"""
