"""The agent of a node, which starts, watches and stops the node's ranks."""
