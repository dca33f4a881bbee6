"""The version, alone, so that setup.cfg and the executors can ask for it."""

__version__ = "0.1.0"
