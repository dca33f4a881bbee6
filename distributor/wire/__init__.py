"""The connection between the driver and the nodes of a run: hub, links and messages."""
