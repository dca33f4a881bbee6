"""The program of a run on this node, with this node's paths."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from distributor.core.files import write_atomically
from distributor.launchers.spark.task.task_spec import ProgramFile
from distributor.serialization.program import Module, Program, Script, in_file
from distributor.spark.executor_modules import spark_files_folder


def program_file(program: Program | ProgramFile) -> BinaryIO:
    """Return a file with the program, and remove those of programs that no run needs any more."""
    if not isinstance(program, ProgramFile):
        return in_file(program_on_this_node(program))
    folder = spark_files_folder()
    for name in program.dropped:
        (folder / name).unlink(missing_ok=True)
    return (folder / program.name).open("rb")


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
