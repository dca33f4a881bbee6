"""All uses of private or undocumented API of other packages, each a small function with a name.

A release of PySpark, torch, MLflow or Python may change what is used here. ``tests/compat`` calls
every function on the real library, and a failing test names what has gone and what depends on it.
Nothing here imports other modules of this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], Any]:
    """Put the decorated function in place of an attribute; its first argument is the original."""
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return replacement

    return replace
