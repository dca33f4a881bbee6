"""The connection between a node and the driver: in this process, by TCP, or none."""
