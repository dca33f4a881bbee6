"""A rank's main module, and those of the processes that ``multiprocessing`` starts for it.

A process that ``multiprocessing`` starts by ``spawn`` or ``forkserver`` runs its parent's main
module once more, to find the classes and functions that are pickled by name. It finds the module
by the name in ``__main__.__spec__``. In a rank that runs a function that is the name of this
module, which then loads the driver's names from the rank's program. (Only Linux lets another
process open its file.) Scripts and modules are run again, as everywhere.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from distributor.serialization.program import Call, load_program

# Names the file with a rank's program for the processes that the rank starts.
PROGRAM_VARIABLE = "DISTRIBUTOR_PROGRAM"
NAME = "distributor.node.worker.main_module"  # in these processes, this is "__mp_main__"


class _MainModule(ModuleType):
    def __repr__(self) -> str:  # a module's own shows the name in its spec
        return "<module '__main__'>"


class _Spec(ModuleSpec):
    """Names the module that processes started by this one run as their main module."""

    @property
    def parent(self) -> str:  # by which relative imports are resolved
        return vars(sys.modules["__main__"]).get("__package__") or ""


def create_main_module(program: int | None) -> None:
    """Replace the main module, which has the names of this package's bootstrap, by an empty one.

    `program` is the descriptor of the file with the pickled call that this rank runs. It is None
    for scripts and modules, which `runpy` runs in main modules of their own.
    """
    module = _MainModule("__main__")
    # multiprocessing's processes send back objects of classes in its second name.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    if program is None:
        vars(module)["__getattr__"] = lambda name: getattr(sys.modules["__main__"], name)
    elif sys.platform == "linux":
        os.environ[PROGRAM_VARIABLE] = f"/proc/{os.getpid()}/fd/{program}"
        module.__spec__ = _Spec(NAME, None)


def load_main_module(namespace: dict[str, Any]) -> None:
    """Fill the globals of the main module of a process that `multiprocessing` has started."""
    for name in namespace.keys() - {"__name__", "__builtins__"}:
        del namespace[name]
    namespace["__spec__"] = _Spec(NAME, None)
    sys.modules["__main__"] = sys.modules[namespace["__name__"]]
    with open(os.environ[PROGRAM_VARIABLE], "rb") as file:
        program = load_program(file.fileno())
    assert isinstance(program, Call)
    for part in program.parts:
        part.load_main(namespace)


if __name__ == "__mp_main__":
    # That of another copy of this module, because the globals of this one are replaced.
    import_module(NAME).load_main_module(globals())
