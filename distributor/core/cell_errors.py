"""Errors below a notebook's cell: their tracebacks end at the user's line, and name cells."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
LIBRARIES = tuple({str(Path(prefix).resolve()) + "/" for prefix in (sys.prefix, sys.base_prefix)})
_FILE = re.compile(r'\bFile "([^"\n]+)"(?=, line \d)')
BUGS = (AssertionError, AttributeError, IndexError, KeyError, NameError, RecursionError)
"""Errors that this package does not raise itself; with its frames, they can be reported."""


def shorten_in_cell(error: BaseException) -> None:
    """Have IPython show an error without frames of this package, and an interrupt as one line.

    Elsewhere, tracebacks remain as they are.
    """
    if "IPython" in sys.modules:
        # IPython calls this method of an error, if it has one, instead of its own function.
        vars(error).setdefault("_render_traceback_", functools.partial(_rendered, error))


def ends_at_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Have IPython show what a function raises without frames of this package."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten_in_cell(error)
            raise

    return call


def cell_name(file: str) -> str:
    """Return the name of a cell of this kernel, such as "Cell In[3]"; "" for other files."""
    if "IPython" not in sys.modules:
        return ""
    from IPython import get_ipython

    # Before version 8, compilers had no such method.
    named = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    return " ".join((named and named(file)) or ())


def with_cell_names(text: str) -> str:
    """Name the cells in a traceback as IPython does, instead of their files."""
    return _FILE.sub(lambda file: cell_name(file[1]) or file[0], text)


def format_users_part(error: BaseException) -> str:
    """Format a traceback from the first frame on that is neither this package's nor a library's.

    If there is none, return the frames below those of this package; "" if there are none either.
    """
    first = below = None
    trace = error.__traceback__
    while trace is not None and first is None:
        file = trace.tb_frame.f_code.co_filename
        below = None if file.startswith(PACKAGE) else below or trace
        if not file.startswith((PACKAGE, *LIBRARIES, "<frozen")):
            first = trace
        trace = trace.tb_next
    shown = first or below
    return "".join(traceback.format_exception(type(error), error, shown)) if shown else ""


def _rendered(error: BaseException) -> list[str]:
    """Return the lines of an error below a cell."""
    from IPython import get_ipython

    if isinstance(error, KeyboardInterrupt):
        return [f"{type(error).__name__}: {error}".rstrip(": ")]
    for each in _chain(error):
        _cut(each)
    formatter: Any = get_ipython().InteractiveTB
    lines: list[str] = formatter.structured_traceback(type(error), error, error.__traceback__)
    return lines


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _cut(error: BaseException) -> None:
    """Remove this package's frames from a traceback, and the libraries' frames below them."""
    frames: list[types.TracebackType] = []
    inside = False
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        inside = inside or file.startswith(PACKAGE)
        if not (inside and file.startswith((PACKAGE, *LIBRARIES, "<frozen", "<string>"))):
            frames.append(trace)
        trace = trace.tb_next
    if inside and isinstance(error, BUGS) and not hasattr(error, "rank_failures"):
        return
    for frame, following in itertools.zip_longest(frames, frames[1:]):
        frame.tb_next = following
    BaseException.with_traceback(error, frames[0] if frames else None)
