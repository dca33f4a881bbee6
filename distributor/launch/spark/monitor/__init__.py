"""The driver's view of one attempt on a cluster: its state, nodes, rendezvous and outcomes."""
