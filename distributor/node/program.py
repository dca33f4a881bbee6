"""What a rank runs: a pickled call or a script."""

from __future__ import annotations

from dataclasses import dataclass

from distributor.wire.pickling import PickledCall


@dataclass(frozen=True)
class Call:
    """A function with its arguments.

    Parameters
    ----------
    name : str
        The function's name, for messages.
    call : PickledCall
        The function and its arguments.
    """

    name: str
    call: PickledCall


@dataclass(frozen=True)
class Script:
    """A Python file with its command-line arguments.

    Parameters
    ----------
    name : str
        The file's name, for messages.
    path : str
        Where it lies; absolute.
    args : tuple of str
        Its command-line arguments.
    source : bytes
        Its text, for nodes that do not have the file.
    """

    name: str
    path: str
    args: tuple[str, ...]
    source: bytes


Program = Call | Script
