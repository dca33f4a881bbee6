"""All uses of private or undocumented API of other packages, each a small function with a name.

A release of PySpark, torch, MLflow or Python may change what is used here. ``tests/compat`` calls
every function on the real library, and a failing test names what has gone and what depends on it.
Nothing here imports other modules of this package.
"""
