"""Pickling of functions, values and exceptions, and the name of what cannot be pickled."""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import pickle
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import cloudpickle

from distributor._compat.cpython import add_source_lines
from distributor._compat.torch import LOAD_STORAGE
from distributor.errors import UnpicklableError
from distributor.serialization import oob_pickle
from distributor.serialization.code_imports import imports_in_code
from distributor.serialization.oob_pickle import PROTOCOL

MAX_EXCEPTION = 16 * 1024 * 1024
"""Bytes of a pickled exception, beyond which only its text travels."""


@dataclass(frozen=True)
class PickledCall:
    """A call, pickled on the driver.

    Parameters
    ----------
    payload : bytes
        The function with its arguments.
    buffers : tuple of buffers
        What of their tensors and arrays is large, which is not in `payload`.
    sources : dict of str to list of str
        Source lines of files that exist only in this process (notebook cells), so that a
        rank's tracebacks and ``inspect.getsource`` work there.
    imports : frozenset of str
        The top-level modules that its functions import, those that travel with it included.
    """

    payload: bytes
    buffers: tuple[Any, ...]
    sources: dict[str, list[str]]
    imports: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The bytes that travel."""
        return len(self.payload) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Unpickle the function, its arguments, and those by name."""
        function, args, kwargs = pickle.loads(self.payload, buffers=self.buffers)
        return function, args, kwargs


def dump_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PickledCall:
    """Pickle a call for the ranks.

    Raises
    ------
    UnpicklableError
        Where something cannot be pickled; it names the variable or argument.
    """
    buffer = io.BytesIO()
    pickler = _SourceCollector(buffer)
    try:
        pickler.dump((function, args, dict(kwargs)))
    except Exception as error:
        raise UnpicklableError(_explain_call(function, args, kwargs, error)) from error
    return PickledCall(
        buffer.getvalue(), tuple(pickler.buffers), pickler.sources, frozenset(pickler.imports)
    )


def dump_value(value: object, file: BinaryIO, what: str) -> None:
    """Pickle a rank's value into `file`.

    Raises
    ------
    UnpicklableError
        Where part of it cannot be pickled; it names that part.
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
    """Unpickle a value; CUDA tensors become CPU tensors where this process has no GPU."""
    return oob_pickle.unpack(file.fileno(), _ValueUnpickler)


def dump_exception(error: BaseException) -> bytes | None:
    """Pickle an exception so that it loads with its own type and arguments, or give None."""
    if not isinstance(error, Exception):
        return None  # a KeyboardInterrupt of a rank must not look like one of the driver's
    for form in (error, _Rebuilt.of(error)):
        try:
            pickled = cloudpickle.dumps(form, protocol=PROTOCOL)
            loaded = _opened(pickle.loads(pickled))
            same = type(loaded) is type(error) and _look(loaded.args) == _look(error.args)
            if same and len(pickled) <= MAX_EXCEPTION:
                return bytes(pickled)
        except Exception:  # any error here only means that this form does not travel
            continue
    return None


def _look(args: tuple[Any, ...]) -> str:
    """Show arguments; where a copy lies in memory is no difference."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(args))


def load_exception(pickled: bytes) -> BaseException | None:
    """Load what `dump_exception` gave; None where this process cannot (a missing module)."""
    try:
        return _opened(pickle.loads(pickled))
    except Exception:
        return None


@dataclass(frozen=True)
class _Rebuilt:
    """An exception whose own pickling fails: its type, arguments and what else can travel."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Rebuilt:
        state = {k: v for k, v in vars(error).items() if not find_unpicklable(k, v)}
        return cls(type(error), error.args, state)

    def build(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)
        BaseException.__setattr__(error, "args", self.args)  # the user's own may forbid it
        error.__dict__.update(self.state)
        return error


def _opened(loaded: Any) -> BaseException:
    error = loaded.build() if isinstance(loaded, _Rebuilt) else loaded
    assert isinstance(error, BaseException)
    return error


def name_of(function: Callable[..., Any]) -> str:
    """Name a callable as its user would: a partial by its function, an instance by its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


class _SourceCollector(oob_pickle.Pickler):
    """Pickles, and gathers what functions import and the source that only this process knows."""

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
    """Make source lines that came with a call visible to `traceback` and `inspect`."""
    for filename, lines in sources.items():
        add_source_lines(filename, lines)


class _ValueUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == LOAD_STORAGE:
            return _load_storage
        return super().find_class(module, name)


def _load_storage(data: bytes) -> Any:
    import torch

    def place(storage: Any, location: str) -> Any:
        wants_gpu = location.startswith("cuda")
        return storage if wants_gpu and not torch.cuda.is_available() else None

    return torch.load(io.BytesIO(data), map_location=place, weights_only=False)


@dataclass(frozen=True)
class Culprit:
    """The innermost part of an object that cannot be pickled."""

    path: str
    type_name: str
    error: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path} is a {self.type_name} ({self.error})"


def find_unpicklable(path: str, obj: object) -> Culprit | None:
    """Find the innermost part of `obj` that cannot be pickled; None where all of it can."""
    why = _refusal(obj)
    if why is None:
        return None
    return _innermost(path, obj, why, {}) or Culprit(path, type(obj).__name__, why, _ADVICE)


def _innermost(
    path: str, obj: object, why: str, seen: dict[int, object], depth: int = 0
) -> Culprit | None:
    """Look into what cannot be pickled; None where only a cycle through `seen` is to blame."""
    if _is_sparks(obj):
        return Culprit(path, type(obj).__name__, "which only the driver has", _ADVICE_ON_SPARK)
    seen[id(obj)] = obj
    goes_round = False
    for part_path, part in _parts(path, obj) if depth < _MAX_DEPTH else ():
        if id(part) in seen:
            goes_round = True
        elif part_why := _refusal(part):
            if found := _innermost(part_path, part, part_why, seen, depth + 1):
                return found
            goes_round = True
    return None if goes_round else Culprit(path, type(obj).__name__, why, _ADVICE)


def _refusal(obj: object) -> str | None:
    """Tell in a line why an object cannot be pickled; None where it can."""
    try:
        cloudpickle.dumps(obj, protocol=PROTOCOL)
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


_MAX_DEPTH = 6
_ADVICE = "Create it inside the function, or pass what it is made from as an argument."
_ADVICE_ON_SPARK = (
    "Ranks have no Spark: pass them collected data, or the path of files that Spark has written."
)


def heaviest(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, int]:
    """Name the variable or argument that makes a call large, with its size in bytes."""
    path, weight = name_of(function), 0
    parts = iter(_inputs(function, args, kwargs).items())
    for _ in range(1 + _MAX_DEPTH):
        weighed = [(_weigh(part), part_path, part) for part_path, part in parts]
        heavy, heavy_path, part = max(weighed, default=(0, "", None), key=lambda found: found[0])
        if not heavy or heavy < weight / 2:
            break
        weight, path, parts = heavy, heavy_path, _parts(heavy_path, part)
    return path, weight


def _weigh(obj: object) -> int:
    """Count the bytes that an object takes; 0 where it cannot be pickled alone."""
    counter = _Counter()
    pickler = oob_pickle.Pickler(counter)
    try:
        pickler.dump(obj)
    except Exception:
        return 0
    return counter.tell() + sum(buffer.raw().nbytes for buffer in pickler.buffers)


class _Counter(io.BytesIO):
    """A file that only counts what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._count += size
        return size

    def tell(self) -> int:
        return self._count


def _inputs(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, object]:
    inputs: dict[str, object] = {name_of(function): function}
    inputs |= {f"argument {i}": arg for i, arg in enumerate(args)}
    return inputs | {f"argument '{key}'": value for key, value in kwargs.items()}


def _explain_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: Exception,
) -> str:
    name = name_of(function)
    for path, obj in _inputs(function, args, kwargs).items():
        if culprit := find_unpicklable(path, obj):
            return f"'{name}' cannot be sent to the ranks: {culprit}. {culprit.advice}"
    return f"'{name}' cannot be sent to the ranks: {error}"


def _parts(path: str, obj: object) -> Iterator[tuple[str, object]]:
    """List what an object is made of, each part with a name that a user recognises."""
    if isinstance(obj, types.FunctionType):
        for name, value in _captured(obj):
            yield f"the variable '{name}' used by {path}", value
    elif isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
        yield path, obj.__func__
    elif isinstance(obj, functools.partial):
        yield path, obj.func
        yield from _parts(f"{path}'s arguments", obj.args)
        yield from _parts(f"{path}'s arguments", obj.keywords)
    elif isinstance(obj, Mapping):
        yield from ((f"{path}[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(obj))
    else:
        yield from ((f"{path}.{key}", value) for key, value in getattr(obj, "__dict__", {}).items())


def _captured(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is not set yet
            yield name, cell.cell_contents
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from (function.__kwdefaults__ or {}).items()
    defaults = function.__defaults__ or ()
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_sparks(obj: object) -> bool:
    """Spark's session is the culprit itself; the locks inside it would tell the user nothing."""
    return type(obj).__module__.split(".")[0] in ("pyspark", "py4j")
