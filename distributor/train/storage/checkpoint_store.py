"""The storage of a run's checkpoints: a checkpoint exists once its manifest is written.

A checkpoint is a folder with the files of all ranks. First the files are written, each in one
pass. Then their sizes are checked. Then the manifest is written, which lists them. Nothing is
appended to, renamed or written twice, because mounted object stores support none of that; only the
log of the whole run is rewritten, if that is possible. Readers ignore a folder without a manifest,
and one whose manifest is incomplete.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pyarrow.fs as pafs

from distributor.errors import DistributorError
from distributor.train.checkpoint import Checkpoint
from distributor.train.storage.filesystems import is_local, list_files, make_folder, resolve
from distributor.train.storage.integrity import check_sizes, find_damage
from distributor.train.storage.manifest import MANIFEST, RESERVED, Manifest, StoredFile
from distributor.train.storage.upload import break_hardlink, size_and_checksum, upload_file
from distributor.train.storage.upload_assignment import (
    Assignment,
    assign_all,
    files_of,
    identities_of,
)

PREFIX = "checkpoint_"
NUMBERED = re.compile(rf"{PREFIX}(\d+)")
"""The names of checkpoints that the user has not named."""
DAMAGED: Literal["damaged"] = "damaged"


class Storage:
    """The folder of one run.

    Parameters
    ----------
    storage_path : str or path
        The folder of all runs: a path, a mounted share, or an address such as
        ``s3://bucket/runs``.
    name : str
        The run's name, which is its folder's name.
    filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        The file system of `storage_path`; by default the one that the path names.

    Attributes
    ----------
    filesystem : pyarrow.fs.FileSystem
        The file system.
    path : str
        The run's folder in it.
    """

    def __init__(
        self, storage_path: str | os.PathLike[str], name: str, filesystem: Any = None
    ) -> None:
        self.filesystem, root = resolve(storage_path, filesystem)
        self.path = f"{root}/{name}"

    @classmethod
    def at(cls, filesystem: pafs.FileSystem, path: str) -> Storage:
        """Return the storage in a run's folder."""
        root, _, name = path.rpartition("/")
        return cls(root, name, filesystem)

    # Single files

    def write(self, name: str, data: bytes) -> StoredFile:
        """Write a file in the run's folder, in one pass."""
        path = f"{self.path}/{name}"
        make_folder(self.filesystem, path.rpartition("/")[0])
        with self.filesystem.open_output_stream(path) as stream:
            stream.write(data)
        return StoredFile(name.rpartition("/")[2], len(data), zlib.crc32(data))

    def read(self, name: str) -> bytes | None:
        """Read a file in the run's folder; return None if it does not exist."""
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}") as stream:
                data: bytes = stream.read()
        except FileNotFoundError:
            return None
        return data

    def remove_files(self, names: Sequence[str]) -> set[str]:
        """Remove files in the run's folder, and return the names of those that existed."""
        infos = self.filesystem.get_file_info([f"{self.path}/{name}" for name in names])
        existing = {info.base_name for info in infos if info.type == pafs.FileType.File}
        for name in existing:
            self.filesystem.delete_file(f"{self.path}/{name}")
        return existing

    # The files of a checkpoint that is being reported

    def upload(
        self,
        folder: str | os.PathLike[str],
        checkpoint: str,
        assignment: Assignment = assign_all,
        *,
        keep: bool = True,
    ) -> tuple[list[StoredFile], list[StoredFile]]:
        """Upload a rank's files into a checkpoint, which does not exist until it is committed.

        Returns the files that it has uploaded, and those of which another rank uploads another
        version.

        Parameters
        ----------
        folder : str or path
            A folder of this machine.
        checkpoint : str
            The checkpoint's name.
        assignment : callable
            Selects the files that this rank uploads; by default all.
        keep : bool
            Whether the folder's files may still be used afterwards, and not only removed.

        Raises
        ------
        DistributorError
            If the checkpoint is already committed: checkpoints are never overwritten.
        """
        self._check_uncommitted(checkpoint)
        files = files_of(folder)
        for target in {self._path(checkpoint, name).rpartition("/")[0] for name in files}:
            make_folder(self.filesystem, target)
        uploaded, others = [], []
        for name, uploads in assignment(identities_of(files)):
            if uploads:
                target = self._path(checkpoint, name)
                sums = upload_file(files[name], self.filesystem, target, keep=keep)
                uploaded.append(StoredFile(name, *sums))
            else:
                sums = size_and_checksum(pafs.LocalFileSystem(), str(files[name]))
                others.append(StoredFile(name, *sums))
        return uploaded, others

    def describe(self, checkpoint: str, assignment: Assignment = assign_all) -> list[StoredFile]:
        """Read the files that ranks have saved in a checkpoint's folder, and describe them.

        Parameters
        ----------
        checkpoint : str
            The checkpoint's name.
        assignment : callable
            Selects the files that this rank reads; by default all.

        Raises
        ------
        DistributorError
            If the checkpoint is already committed.
        """
        self._check_uncommitted(checkpoint)
        root = f"{self.path}/{checkpoint}"
        existing = [info.path[len(root) + 1 :] for info in list_files(self.filesystem, root)]
        names = sorted(set(existing).difference(RESERVED))
        return [
            StoredFile(name, *size_and_checksum(self.filesystem, f"{root}/{name}"))
            for name, _ in assignment(dict.fromkeys(names, ""))
        ]

    def contains(self, checkpoint: Checkpoint, name: str | None = None) -> bool:
        """Return whether a checkpoint is in the run's folder, and has this name if one is given."""
        if (paths := self._comparable_paths(checkpoint)) is None:
            return False
        run, path = paths
        return path.startswith(f"{run}/") if name is None else path == f"{run}/{name}"

    def is_inside(self, checkpoint: Checkpoint) -> bool:
        """Return whether the run's folder is a checkpoint's folder, or inside it."""
        if (paths := self._comparable_paths(checkpoint)) is None:
            return False
        run, path = paths
        return f"{run}/".startswith(f"{path}/")

    def _comparable_paths(self, checkpoint: Checkpoint) -> tuple[str, str] | None:
        """Return the paths of the run's folder and of a checkpoint; None on two file systems."""
        if is_local(self.filesystem) and is_local(checkpoint.filesystem):
            return os.path.realpath(self.path), os.path.realpath(checkpoint.path)
        if self.filesystem.equals(checkpoint.filesystem):
            return self.path, checkpoint.path
        return None

    def commit(self, checkpoint: str, manifest: Manifest) -> None:
        """Check that all files of a checkpoint are in storage, and write its manifest.

        Raises
        ------
        DistributorError
            If a file is missing, or has another size.
        """
        check_sizes(self.filesystem, f"{self.path}/{checkpoint}", manifest.files)
        self._remove_other_files(checkpoint, manifest.files)
        self.write(f"{checkpoint}/{MANIFEST}", manifest.to_json())

    def _check_uncommitted(self, checkpoint: str) -> None:
        if self.manifest_of(checkpoint) is not None:
            raise DistributorError(
                f"The checkpoint {checkpoint} already exists in {self.path}, and is not "
                "overwritten. Report the new one under another checkpoint_dir_name."
            )

    def _remove_other_files(self, checkpoint: str, files: Iterable[StoredFile]) -> None:
        """Remove files that a killed attempt has left in a checkpoint's folder."""
        listed = {self._path(checkpoint, file.name) for file in files}
        existing = {info.path for info in list_files(self.filesystem, self._path(checkpoint))}
        if listed <= existing:  # else the file system lists other paths than were written
            for path in existing - listed:
                self.filesystem.delete_file(path)

    # Checkpoints

    def checkpoint(self, name: str) -> Checkpoint:
        """Return a checkpoint by its name."""
        return Checkpoint(f"{self.path}/{name}", self.filesystem)

    def committed(self) -> list[tuple[str, Manifest]]:
        """List the names and manifests of the checkpoints that exist, in the order of reports."""
        return self.survey()[0]

    def survey(self) -> tuple[list[tuple[str, Manifest]], list[str]]:
        """Return the same as `committed`, and the names of checkpoints with a damaged manifest."""
        found = [(name, self._read_manifest(name)) for name in self._folders()]
        manifests = [(name, each) for name, each in found if isinstance(each, Manifest)]
        damaged = [name for name, each in found if each == DAMAGED]
        return sorted(manifests, key=lambda pair: pair[1].index), damaged

    def next_index(self) -> int:
        """Return the next checkpoint number; a folder's number is never used twice."""
        return 1 + max(map(_index_of, self._numbered()), default=-1)

    def find_uncommitted(self, before: str) -> list[str]:
        """Return the names of checkpoints before another that were begun and never committed.

        A checkpoint with a damaged manifest is not included: a person may be able to repair it.
        """
        old = [name for name in self._numbered() if _index_of(name) < _index_of(before)]
        infos = self.filesystem.get_file_info([self._path(name, MANIFEST) for name in old])
        missing = pafs.FileType.NotFound
        return [name for name, info in zip(old, infos, strict=True) if info.type == missing]

    def manifest_of(self, checkpoint: str) -> Manifest | None:
        """Read a checkpoint's manifest; return None if it is not committed or is damaged."""
        manifest = self._read_manifest(checkpoint)
        return manifest if isinstance(manifest, Manifest) else None

    def _read_manifest(self, checkpoint: str) -> Manifest | Literal["damaged"] | None:
        text = self.read(f"{checkpoint}/{MANIFEST}")
        try:
            return Manifest.from_json(text) if text is not None else None
        except (ValueError, TypeError, KeyError):
            return DAMAGED  # incomplete, or modified

    def find_damage(self, checkpoint: str, files: Sequence[StoredFile]) -> str | None:
        """Read files of a checkpoint completely, and describe the first that is damaged."""
        return find_damage(self.filesystem, self._path(checkpoint), files)

    def break_hardlinks(self, checkpoint: str, files: Sequence[StoredFile]) -> None:
        """Ensure that files of a checkpoint cannot be modified through other names of theirs."""
        if is_local(self.filesystem):
            for file in files:
                break_hardlink(self._path(checkpoint, file.name))

    def remove(self, checkpoint: str) -> None:
        """Remove a checkpoint: its manifest first, so that no reader sees half of it."""
        manifest = self._path(checkpoint, MANIFEST)
        if self.filesystem.get_file_info(manifest).type == pafs.FileType.File:
            self.filesystem.delete_file(manifest)
        self.filesystem.delete_dir(self._path(checkpoint))

    def _folders(self) -> list[str]:
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        infos = self.filesystem.get_file_info(selector)
        return [info.base_name for info in infos if info.type == pafs.FileType.Directory]

    def _numbered(self) -> list[str]:
        return sorted(name for name in self._folders() if NUMBERED.fullmatch(name))

    def _path(self, checkpoint: str, *names: str) -> str:
        return "/".join((self.path, checkpoint, *names))


def _index_of(checkpoint: str) -> int:
    """Return the number in a checkpoint's name; -1 if the user has named it."""
    match = NUMBERED.fullmatch(checkpoint)
    return int(match[1]) if match else -1
