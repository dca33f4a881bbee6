"""Data and pure functions that all layers share, without processes or sockets."""
