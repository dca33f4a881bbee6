"""One node's ranks: started, watched and stopped, wherever the node is."""
