"""Pickles of functions that keep the names of the files in which their code was written.

cloudpickle 3.1.3 and newer replace these names, so that a pickle does not depend on where a
function was defined. Tracebacks then show neither the file nor the line of the code.
"""

from __future__ import annotations

import io
import types
from collections.abc import Callable
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which here keeps the file name of each code object."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return _code_of_file, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        return super().reducer_override(obj)


def dumps(obj: object) -> bytes:
    """Pickle an object, by value if it cannot be imported elsewhere."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(obj)
    return buffer.getvalue()


def _code_of_file(
    filename: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]
) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)
