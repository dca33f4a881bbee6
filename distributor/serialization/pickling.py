"""Pickling of functions, values and exceptions."""

from __future__ import annotations

import io
import linecache
import os
import pickle
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from distributor._compat.cpython import add_source_lines
from distributor.errors import UnpicklableError
from distributor.serialization import oob_pickle
from distributor.serialization.code_imports import imports_in_code
from distributor.serialization.pickle_diagnostics import explain_call, find_unpicklable

MAX_EXCEPTION = 16 * 1024 * 1024
"""Bytes of a pickled exception, beyond which only its text travels."""


@dataclass(frozen=True)
class PickledCall:
    """A call that was pickled on the driver.

    Parameters
    ----------
    payload : bytes
        The function with its arguments.
    buffers : tuple of buffers
        The large buffers of their tensors and arrays, which are not in `payload`.
    sources : dict of str to list of str
        Source lines of files that exist only in this process (notebook cells), so that a
        rank's tracebacks and ``inspect.getsource`` work there.
    imports : frozenset of str
        The top-level modules that its functions import, and those pickled with them.
    """

    payload: bytes
    buffers: tuple[Any, ...]
    sources: dict[str, list[str]]
    imports: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The bytes that are sent to the ranks."""
        return len(self.payload) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function, its positional and its keyword arguments."""
        function, args, kwargs = pickle.loads(self.payload, buffers=self.buffers)
        return function, args, kwargs


def dump_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PickledCall:
    """Pickle a call for the ranks.

    Raises
    ------
    UnpicklableError
        If something cannot be pickled; the message names the variable or argument.
    """
    buffer = io.BytesIO()
    pickler = _SourceCollector(buffer)
    try:
        pickler.dump((function, args, dict(kwargs)))
    except Exception as error:
        raise UnpicklableError(explain_call(function, args, kwargs, error)) from error
    return PickledCall(
        buffer.getvalue(), tuple(pickler.buffers), pickler.sources, frozenset(pickler.imports)
    )


def dump_value(value: object, file: BinaryIO, what: str) -> None:
    """Pickle a rank's value into `file`.

    Raises
    ------
    UnpicklableError
        If part of it cannot be pickled; the message names that part.
    """
    try:
        oob_pickle.pack(value, file)
    except (MemoryError, OSError):
        raise
    except Exception as error:
        culprit = find_unpicklable("value", value)
        where = f"{culprit}" if culprit else f"{type(value).__name__}: {error}"
        raise UnpicklableError(f"{what} returned a value that cannot be pickled: {where}") from None


def load_value(file: BinaryIO) -> Any:
    """Return a value, whose CUDA tensors were pickled as CPU tensors."""
    return oob_pickle.unpack(file.fileno())


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle an exception, or return None if it would not load with its type and arguments."""
    if not isinstance(error, Exception):
        return None  # a rank's KeyboardInterrupt must not look like the driver's
    for form in (error, _Rebuilt.of(error)):
        try:
            pickled = oob_pickle.dumps(form)
            loaded = _exception_in(pickle.loads(pickled))
            same = type(loaded) is type(error) and _text_of(loaded.args) == _text_of(error.args)
            if same and len(pickled) <= MAX_EXCEPTION:
                return pickled
        except Exception:  # any error only means that this form cannot be pickled
            continue
    return None


def _text_of(args: tuple[Any, ...]) -> str:
    """Return arguments as text without addresses, which differ between copies."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(args))


def load_exception(pickled: bytes) -> BaseException | None:
    """Load an exception; None if this process cannot, for example without its module."""
    try:
        return _exception_in(pickle.loads(pickled))
    except Exception:
        return None


@dataclass(frozen=True)
class _Rebuilt:
    """An exception whose own pickling fails: its type, arguments and picklable attributes."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Rebuilt:
        state = {k: v for k, v in vars(error).items() if not find_unpicklable(k, v)}
        return cls(type(error), error.args, state)

    def build(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)
        BaseException.__setattr__(error, "args", self.args)  # the user's class may forbid it
        error.__dict__.update(self.state)
        return error


def _exception_in(loaded: Any) -> BaseException:
    error = loaded.build() if isinstance(loaded, _Rebuilt) else loaded
    assert isinstance(error, BaseException)
    return error


class _SourceCollector(oob_pickle.Pickler):
    """A pickler that collects functions' imports, and source that only this process has."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.sources: dict[str, list[str]] = {}
        self.imports: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            self.imports.update(imports_in_code(obj.__code__))
            filename = obj.__code__.co_filename
            if filename not in self.sources and not os.path.exists(filename):
                self.sources[filename] = linecache.getlines(filename, obj.__globals__)
        return super().reducer_override(obj)


def install_sources(sources: Mapping[str, list[str]]) -> None:
    """Make source lines that were sent with a call visible to `traceback` and `inspect`."""
    for filename, lines in sources.items():
        add_source_lines(filename, lines)
