"""Which variable of a call cannot be pickled, and which is large."""

from __future__ import annotations

import functools
import io
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distributor.serialization import oob_pickle
from distributor.serialization.code_search import (
    COLLECTIONS,
    captured,
    plain_items,
    without_partials,
)

_MAX_DEPTH = 6
_ADVICE = "Create it inside the function, or pass what it is made from as an argument."
_SPARK_ADVICE = (
    "Ranks have no Spark session. A DataFrame is sent if it is itself an argument of the function, "
    "or in a list, tuple or dict among them; pass anything else as collected data."
)


def name_of(function: Callable[..., Any]) -> str:
    """Return a callable's name; a partial has its function's, an instance its class's."""
    function = without_partials(function)
    return str(getattr(function, "__name__", type(function).__name__))


class RefusedError(TypeError):
    """Raised by a pickler for an object of which it needs no other reason."""

    def __init__(self, obj: object, why: str) -> None:
        super().__init__(why)
        self.obj = obj


@dataclass(frozen=True)
class Culprit:
    """The innermost part of an object that cannot be pickled."""

    path: str
    type_name: str
    error: str
    advice: str

    @classmethod
    def of(cls, path: str, obj: object, error: Exception) -> Culprit:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return cls(path, type(obj).__name__, why, _ADVICE)

    def __str__(self) -> str:
        article = "an" if self.type_name.startswith(tuple("AEIO")) else "a"
        return f"{self.path} is {article} {self.type_name} ({self.error})"


def explain_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: Exception,
) -> str:
    """Return why a call cannot be pickled; the message names the variable or argument."""
    name = name_of(function)
    for path, obj in _inputs(function, args, kwargs).items():
        if culprit := find_unpicklable(path, obj):
            return f"'{name}' cannot be sent to the ranks: {culprit}. {culprit.advice}"
    return f"'{name}' cannot be sent to the ranks: {error}"


def explain_parts(parts: Mapping[str, object]) -> str | None:
    """Return which of these objects cannot be pickled, by its name, and why; None if all can."""
    for name, part in parts.items():
        if culprit := find_unpicklable(name, part):
            return f"{name} cannot be pickled: {culprit}. {culprit.advice}"
    return None


def find_unpicklable(
    path: str, obj: object, pickler: Callable[[io.BytesIO], Any] = oob_pickle.Pickler
) -> Culprit | None:
    """Return the innermost part of an object that cannot be pickled; None if there is none."""

    def refusal(part: object) -> Exception | None:
        try:
            pickler(_Counter()).dump(part)
        except Exception as error:
            return error
        return None

    if (error := refusal(obj)) is None:
        return None
    return _innermost(path, obj, error, refusal, {}) or Culprit.of(path, obj, error)


def _innermost(
    path: str,
    obj: object,
    error: Exception,
    refusal: Callable[[object], Exception | None],
    seen: dict[int, object],
    depth: int = 0,
) -> Culprit | None:
    """Search an object that cannot be pickled; None if only a cycle through `seen` prevents it."""
    if type(obj).__module__.split(".")[0] in ("pyspark", "py4j"):  # its parts mean nothing to users
        return Culprit(path, type(obj).__name__, "which only the driver has", _SPARK_ADVICE)
    if isinstance(error, RefusedError) and error.obj is obj:
        return Culprit.of(path, obj, error)
    seen[id(obj)] = obj
    has_cycle = False
    for part_path, part in _parts(path, obj) if depth < _MAX_DEPTH else ():
        if id(part) in seen:
            has_cycle = True
        elif part_error := refusal(part):
            if found := _innermost(part_path, part, part_error, refusal, seen, depth + 1):
                return found
            has_cycle = True
    return None if has_cycle else Culprit.of(path, obj, error)


def heaviest(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, int]:
    """Return the name and size (bytes) of the variable or argument that makes a call large."""
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
    """Return the bytes that an object takes; 0 if it cannot be pickled alone."""
    counter = _Counter()
    pickler = oob_pickle.Pickler(counter)
    try:
        pickler.dump(obj)
    except Exception:
        return 0
    return counter.count + sum(buffer.raw().nbytes for buffer in pickler.buffers)


class _Counter(io.BytesIO):
    """A file that only counts the bytes written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.count += size
        return size


def _inputs(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, object]:
    inputs: dict[str, object] = {name_of(function): function}
    inputs |= {f"argument {i}": arg for i, arg in enumerate(args)}
    return inputs | {f"argument '{key}'": value for key, value in kwargs.items()}


def _parts(path: str, obj: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of an object, each with a name that the user recognizes."""
    if isinstance(obj, types.FunctionType):
        for name, value in captured(obj):
            yield f"the variable '{name}' used by {path}", value
    elif isinstance(obj, types.MethodType):
        yield f"{path}.__self__", obj.__self__
        yield path, obj.__func__
    elif isinstance(obj, functools.partial):
        yield path, obj.func
        yield from _parts(f"{path}'s arguments", obj.args)
        yield from _parts(f"{path}'s arguments", obj.keywords)
    elif isinstance(obj, COLLECTIONS):
        yield from ((f"{path}[{key!r}]", value) for key, value in plain_items(obj))
    else:
        yield from ((f"{path}.{key}", value) for key, value in getattr(obj, "__dict__", {}).items())
