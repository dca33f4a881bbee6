"""A checkpoint: a folder of files, on this machine or in shared storage."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from distributor.train.storage.filesystems import files_in, is_local, resolve
from distributor.train.storage.shared_download import borrowed

METADATA = ".metadata.json"
"""The file that holds a checkpoint's metadata, as Ray Train calls it."""


class Checkpoint:
    """A folder of files; what is in them is up to the training function.

    The names are those of ``ray.train.Checkpoint``.

    Parameters
    ----------
    path : str or path
        The folder, or its address, such as ``s3://bucket/run/checkpoint_000003``.
    filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        Where it is; by default `path` says so.

    Attributes
    ----------
    path : str
        The folder in `filesystem`.
    filesystem : pyarrow.fs.FileSystem
        Where it is.
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        self.filesystem, self.path = resolve(path, filesystem)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Make one of a folder of this machine; nothing is copied."""
        return cls(path, pafs.LocalFileSystem())

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Have it as a folder of this machine: itself where it is one, else a copy for a while.

        Processes of one node that have it at the same time share the copy, so do not change it.

        Raises
        ------
        FileNotFoundError
            Where the checkpoint is gone.
        """
        self.check_there()
        if is_local(self.filesystem):
            yield self.path
        else:
            with borrowed(f"checkpoint-{self._identity()}", self.to_directory) as folder:
                yield str(folder)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy it into a folder of this machine.

        Parameters
        ----------
        path : str or path, optional
            The folder; by default a new temporary one.

        Returns
        -------
        str
            The folder.

        Raises
        ------
        FileNotFoundError
            Where the checkpoint is gone.
        """
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-") if path is None else path)
        folder.mkdir(parents=True, exist_ok=True)
        self.check_there()
        pafs.copy_files(self.path, str(folder), self.filesystem, pafs.LocalFileSystem())
        return str(folder)

    def get_metadata(self) -> dict[str, Any]:
        """Read what `set_metadata` wrote; empty where it wrote nothing."""
        file = f"{self.path}/{METADATA}"
        if self.filesystem.get_file_info(file).type != pafs.FileType.File:
            return {}
        with self.filesystem.open_input_stream(file) as stream:
            metadata: dict[str, Any] = json.loads(stream.read())
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Keep metadata, which JSON must be able to hold, in the checkpoint."""
        with self.filesystem.open_output_stream(f"{self.path}/{METADATA}") as stream:
            stream.write(json.dumps(dict(metadata)).encode())

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def check_there(self) -> None:
        """Raise FileNotFoundError where it is gone."""
        if self.filesystem.get_file_info(self.path).type != pafs.FileType.Directory:
            raise FileNotFoundError(f"There is no checkpoint at {self.path}.")

    def _identity(self) -> str:
        """Tell it, and what is in it by now, from any other, in all processes alike."""
        infos = files_in(self.filesystem, self.path)
        files = [(info.path, info.size, info.mtime_ns) for info in infos]
        try:
            filesystem = pickle.dumps(self.filesystem)
        except Exception:
            filesystem = os.urandom(16)  # nobody else has this one
        return hashlib.sha256(filesystem + repr((self.path, sorted(files))).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Checkpoint(filesystem={self.filesystem.type_name}, path={self.path})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self.path == other.path and self.filesystem.equals(other.filesystem)

    def __hash__(self) -> int:
        return hash(self.path)
