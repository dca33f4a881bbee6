"""Helpers of the tests: clusters and machines for fault injection, fixtures and checkers."""
