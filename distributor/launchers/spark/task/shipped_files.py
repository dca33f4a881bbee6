"""Files that Spark ships with a run, and the paths of its program on this node."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from distributor.core.files import atomic_path, write_atomically
from distributor.serialization.program import Module, Program, Script


def spark_files_folder() -> Path:
    """Return the folder of Spark's files, which Spark names relative to its working folder."""
    from pyspark import SparkFiles

    return Path(SparkFiles.getRootDirectory()).absolute()


def unpack_modules(archive: str) -> str:
    """Unpack the user's modules, once on each node, and return their folder."""
    from pyspark import SparkFiles

    folder = spark_files_folder() / archive.removesuffix(".zip")
    if not folder.exists():
        with atomic_path(folder) as partial:  # other tasks of this node may be doing the same
            _unpack(SparkFiles.get(archive), partial)
    return str(folder)


def _unpack(archive: str, folder: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        for entry in packed.infolist():
            entry.filename = unquote(entry.filename, errors="surrogateescape")
            extracted = packed.extract(entry, folder)
            os.chmod(extracted, entry.external_attr >> 16)  # `extract` ignores permissions


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
