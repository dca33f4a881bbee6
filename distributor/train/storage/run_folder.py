"""The folder of a run in storage: its single files, and which checkpoints are in it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import pyarrow.fs as pafs

from distributor.filesystems import is_local, make_folder, native
from distributor.train.checkpoint import Checkpoint
from distributor.train.storage.manifest import StoredFile


class RunFolder:
    """The folder of one run.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
        The file system.
    path : str
        The folder in it.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self.filesystem = filesystem
        self.path = path

    def write(self, name: str, data: bytes) -> StoredFile:
        """Write a file in the run's folder, in one pass."""
        path = f"{self.path}/{name}"
        make_folder(self.filesystem, path.rpartition("/")[0])
        with self.filesystem.open_output_stream(native(self.filesystem, path)) as stream:
            stream.write(data)
        return StoredFile(name.rpartition("/")[2], len(data), zlib.crc32(data))

    def read(self, name: str) -> bytes | None:
        """Read a file in the run's folder; return None if it does not exist."""
        path = native(self.filesystem, f"{self.path}/{name}")
        try:
            with self.filesystem.open_input_stream(path) as stream:
                data: bytes = stream.read()
        except FileNotFoundError:
            return None
        return data

    def remove_files(self, names: Sequence[str]) -> set[str]:
        """Remove files in the run's folder, in order, and return those that existed."""
        paths = {name: native(self.filesystem, f"{self.path}/{name}") for name in names}
        infos = self.filesystem.get_file_info(list(paths.values()))
        found = [info.type == pafs.FileType.File for info in infos]
        existing = [name for name, exists in zip(names, found, strict=True) if exists]
        for name in existing:
            self.filesystem.delete_file(paths[name])
        return set(existing)

    def contains(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is in the run's folder, at any depth."""
        return self._relative_path(checkpoint) is not None

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        """Return the name of a checkpoint that is directly in the run's folder, otherwise None."""
        path = self._relative_path(checkpoint)
        return None if path is None or "/" in path else path

    def is_inside(self, checkpoint: Checkpoint) -> bool:
        """Return whether the run's folder is a checkpoint's folder, or inside it."""
        if (paths := self._comparable_paths(checkpoint)) is None:
            return False
        run, path = paths
        return f"{run}/".startswith(f"{path}/")

    def _relative_path(self, checkpoint: Checkpoint) -> str | None:
        """Return a checkpoint's path in the run's folder; None if it is not in it."""
        if (paths := self._comparable_paths(checkpoint)) is None:
            return None
        run, path = paths
        return path.removeprefix(f"{run}/") if path.startswith(f"{run}/") else None

    def _comparable_paths(self, checkpoint: Checkpoint) -> tuple[str, str] | None:
        """Return the paths of the run's folder and of a checkpoint; None on two file systems."""
        if is_local(self.filesystem) and is_local(checkpoint.filesystem):
            return os.path.realpath(self.path), os.path.realpath(checkpoint.path)
        if self.filesystem.equals(checkpoint.filesystem):
            return self.path, os.path.normpath(checkpoint.path)
        return None
