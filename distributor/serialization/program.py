"""What a rank runs: a pickled call or a script."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from distributor.core.module_search import Location
from distributor.serialization import oob_pickle
from distributor.serialization.code_search import imports_in_source
from distributor.serialization.pickling import PickledCall


@dataclass(frozen=True)
class FileArgument:
    """A command-line argument that is the path of a file, which each rank creates."""

    name: str
    content: str


Argument = str | FileArgument


@dataclass(frozen=True)
class _Program:
    name: str  # for messages
    _: KW_ONLY
    args: tuple[Argument, ...] = ()  # what the program sees in sys.argv
    begins_with: str = ""  # a function to call first: "package.module:function"
    located: tuple[Location, ...] = ()  # modules that local ranks do not find by sys.path


@dataclass(frozen=True)
class Call(_Program):
    """A function with its arguments, of which some may be pickled separately.

    `further` has those that differ among runs of one `SharedFunction`. Its function is not called.
    """

    call: PickledCall
    further: PickledCall | None = None

    @property
    def parts(self) -> tuple[PickledCall, ...]:
        """What is pickled."""
        return (self.call,) if self.further is None else (self.call, self.further)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def imports(self) -> frozenset[str]:
        """The full names that the pickled functions import: modules, and perhaps parts of them."""
        return frozenset().union(*(part.imports for part in self.parts))

    @property
    def uses_environment(self) -> bool:
        """Whether it mentions the process's environment variables."""
        return any(part.uses_environment for part in self.parts)

    def mentions(self, name: bytes) -> bool:
        """Return whether the pickled functions and values contain a name, in lower case or not."""
        found = re.compile(re.escape(name), re.IGNORECASE)
        return any(found.search(part.payload) for part in self.parts)

    def load(
        self, main: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function, its positional and its keyword arguments; fill the main module."""
        (function, args, kwargs), *further = (part.load(main) for part in self.parts)
        for _, others, named in further:
            args, kwargs = (*args, *others), {**kwargs, **named}
        return function, args, kwargs


@dataclass(frozen=True)
class Script(_Program):
    """A Python file with its command-line arguments."""

    path: str  # absolute
    source: bytes  # for nodes that do not have the file

    @property
    def folder(self) -> str:
        """The folder of its own modules: that of the file, if the path is a link to it."""
        return os.path.dirname(os.path.realpath(self.path))

    @property
    def size(self) -> int:
        return len(self.source)

    @property
    def imports(self) -> frozenset[str]:
        """The full names that the script imports: modules, and perhaps parts of them."""
        return imports_in_source(self.source)

    def mentions(self, name: bytes) -> bool:
        """Return whether the text contains a name, in lower case or not."""
        return name in self.source.lower()


@dataclass(frozen=True)
class Module(_Program):
    """A Python module with its command-line arguments, run as ``python -m`` runs it."""

    folder: str  # that the driver searches first; empty on nodes, which receive its files

    @property
    def size(self) -> int:
        """The bytes that are sent to nodes: none, as its files are among the user's modules."""
        return 0

    @property
    def imports(self) -> frozenset[str]:
        return frozenset({self.name})

    def mentions(self, name: bytes) -> bool:
        """Return whether an argument contains a name; what the module itself needs is not known."""
        return any(isinstance(arg, str) and name.decode() in arg.lower() for arg in self.args)


Program = Call | Script | Module


def write_files(args: Iterable[Argument], folder: str) -> list[str]:
    """Write the files of file arguments into a folder, and return all arguments as strings."""
    written = []
    for arg in args:
        if isinstance(arg, FileArgument):
            path = Path(folder, arg.name)
            path.write_text(arg.content, encoding="utf-8")
            arg = str(path)
        written.append(arg)
    return written


@dataclass(frozen=True)
class ContinuedCall:
    """A call in a file of this node, with arguments that differ among runs."""

    path: str
    further: PickledCall


def in_file(program: Program | ContinuedCall) -> BinaryIO:
    """Write a program to an anonymous file, which the ranks of a node can map."""
    file = oob_pickle.anonymous_file()
    oob_pickle.pack(program, file)
    return file


def load_program(file: int) -> Program:
    """Map the file of a program, and return the program."""
    found: Program | ContinuedCall = oob_pickle.unpack(file)
    if not isinstance(found, ContinuedCall):
        return found
    with open(found.path, "rb") as shared:
        call: Call = oob_pickle.unpack(shared.fileno())
    return replace(call, further=found.further)
