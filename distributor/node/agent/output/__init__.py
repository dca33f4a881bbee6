"""What a node's ranks print and report, and the node's utilization, on their way to a sink."""
