"""The user's line that started a run, by which Spark's UI names the job."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

from distributor._compat.pyspark import CALL_SITE, CALL_SITE_DETAILS
from distributor.core.text import printable

_PACKAGE, _COMMAND_LINE = "distributor", "distributor.cli"
_MAX_FRAMES = 20
"""Frames in the details: Spark's default for its own (``spark.callstack.depth``)."""


@dataclass(frozen=True)
class CallSite:
    """The line that started a run.

    Parameters
    ----------
    short : str
        File and line, such as ``train.py:42``.
    long : str
        The call stack, innermost call first.
    """

    short: str
    long: str

    @classmethod
    def of_caller(cls, program_name: str) -> CallSite:
        """Return the innermost line outside this package; for the command line, its program."""
        frames = list(islice(_callers(), _MAX_FRAMES))
        if not frames:
            return cls(program_name, f"distributor run {program_name}")
        lines = [f"{frame.f_code.co_name} at {_place(frame)}" for frame in frames]
        return cls(_place(frames[0]), "\n".join(lines))

    def set_on(self, context: Any) -> None:
        """Name the jobs that the calling thread submits to this ``SparkContext``."""
        context.setLocalProperty(CALL_SITE, printable(self.short))
        context.setLocalProperty(CALL_SITE_DETAILS, printable(self.long))


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the user's code, innermost first; none if the command line called."""
    frame = inspect.currentframe()
    is_inside = True
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if is_inside and module == _COMMAND_LINE:
            return
        is_inside = is_inside and module.partition(".")[0] == _PACKAGE
        if not is_inside:
            yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    if not file.startswith("<"):  # such as "<stdin>"
        file = os.path.basename(file) if os.path.exists(file) else "<cell>"
    return f"{file}:{frame.f_lineno}"
