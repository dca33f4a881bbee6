"""The paths of a run's program on this node."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from distributor.core.files import write_atomically
from distributor.serialization.program import Module, Program, Script


def program_on_this_node(program: Program) -> Program:
    """Return the program with paths of this node; a script has the text that the driver read."""
    if isinstance(program, Module):
        return replace(program, folder="")
    if not isinstance(program, Script):
        return program
    try:
        if Path(program.path).read_bytes() == program.source:
            return program
    except OSError:
        pass  # not on this node: the nodes need not share the driver's disk
    return replace(program, path=str(_write_script(program)))


def _write_script(script: Script) -> Path:
    from pyspark import SparkFiles

    digest = hashlib.sha256(script.source).hexdigest()[:12]
    path = Path(SparkFiles.getRootDirectory(), f"distributor-{digest}", script.name)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, script.source)
    return path
