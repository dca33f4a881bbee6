"""A shim for tools that look for setup.py: all metadata is in setup.cfg."""

from setuptools import setup

setup()
