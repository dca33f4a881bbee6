"""The version, in a module of its own so that setup.cfg and executors can read it."""

__version__ = "0.1.0"
