"""Where a run's checkpoints are kept: what is there counts once its manifest is.

A checkpoint is a folder with the files of all ranks. They are written first, each in one go; then
their sizes are looked at; then the manifest, which lists them. Nothing is appended to, renamed or
written twice, for mounted object stores can do none of that. Whoever reads takes a folder without a
manifest, or one whose manifest is cut short, for none.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from distributor.errors import DistributorError
from distributor.train.checkpoint import Checkpoint
from distributor.train.filesystems import resolve

MANIFEST = ".manifest.json"
PREFIX = "checkpoint_"
NUMBERED = re.compile(rf"{PREFIX}(\d+)")
CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class Stored:
    """A file of a checkpoint.

    Parameters
    ----------
    name : str
        Its path below the checkpoint's folder.
    size : int
        Its bytes.
    checksum : int
        Their CRC-32.
    """

    name: str
    size: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a committed checkpoint consists of.

    Parameters
    ----------
    index : int
        The number of the report that it came with, from 0.
    metrics : mapping of str to object
        What was reported with it.
    world_size : int
        How many ranks wrote it.
    positions : mapping of str to object
        How far each of the ranks' loaders was, by its number.
    files : tuple of Stored
        All its files.
    """

    index: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    world_size: int
    positions: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Stored, ...]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        fields = json.loads(text)
        return cls(**{**fields, "files": tuple(Stored(**file) for file in fields["files"])})


class Storage:
    """The folder of one run.

    Parameters
    ----------
    storage_path : str or path
        Where runs are kept: a path, a mounted share, or an address such as ``s3://bucket/runs``.
    name : str
        The run's name, and its folder's.
    filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        Where `storage_path` is.
    """

    def __init__(
        self, storage_path: str | os.PathLike[str], name: str, filesystem: Any = None
    ) -> None:
        self.filesystem, root = resolve(storage_path, filesystem)
        self.path = f"{root}/{name}"

    @classmethod
    def at(cls, filesystem: pafs.FileSystem, path: str) -> Storage:
        """Give that of a run's folder in a file system."""
        root, _, name = path.rpartition("/")
        return cls(root, name, filesystem)

    def write(self, name: str, data: bytes) -> Stored:
        """Write a file of the run's folder, whole."""
        path = f"{self.path}/{name}"
        self.filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        with self.filesystem.open_output_stream(path) as stream:
            stream.write(data)
        return Stored(name.rpartition("/")[2], len(data), zlib.crc32(data))

    def read(self, name: str) -> bytes | None:
        """Read a file of the run's folder; None where there is none."""
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}") as stream:
                data: bytes = stream.read()
        except FileNotFoundError:
            return None
        return data

    def take_away(self, names: Sequence[str]) -> set[str]:
        """Remove such files; give the names of those that were there."""
        infos = self.filesystem.get_file_info([f"{self.path}/{name}" for name in names])
        there = {info.base_name for info in infos if info.type == pafs.FileType.File}
        for name in there:
            self.filesystem.delete_file(f"{self.path}/{name}")
        return there

    def upload(self, folder: str | os.PathLike[str], checkpoint: str) -> list[Stored]:
        """Write a rank's files into a checkpoint, which exists only once it is committed.

        Parameters
        ----------
        folder : str or path
            A folder of this machine.
        checkpoint : str
            The checkpoint's name.

        Raises
        ------
        DistributorError
            Where the checkpoint is committed already: nothing that is saved is written over.
        """
        if self.manifest_of(checkpoint) is not None:
            raise DistributorError(
                f"The checkpoint {checkpoint} is already in {self.path}, and is not written over. "
                "Report it under another checkpoint_dir_name."
            )
        root = Path(folder)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        return [self._write(file, str(file.relative_to(root)), checkpoint) for file in files]

    def described(self, checkpoint: str) -> list[Stored]:
        """Describe the files that lie in a checkpoint's folder already; reads all of them."""
        root = f"{self.path}/{checkpoint}"
        infos = self.filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
        return [
            Stored(info.path[len(root) + 1 :], *self._sum_of(info.path))
            for info in infos
            if info.type == pafs.FileType.File
        ]

    def commit(self, checkpoint: str, manifest: Manifest) -> None:
        """Make a checkpoint exist, all of whose files are there.

        Raises
        ------
        DistributorError
            Where one is not there, or not whole.
        """
        self._check_whole(checkpoint, manifest.files)
        self.write(f"{checkpoint}/{MANIFEST}", manifest.to_json())

    def committed(self) -> list[tuple[str, Manifest]]:
        """List the checkpoints that exist, and their manifests, in the order of their reports."""
        found = (
            (name, manifest)
            for name in self._folders()
            if (manifest := self.manifest_of(name)) is not None
        )
        return sorted(found, key=lambda pair: pair[1].index)

    def next_index(self) -> int:
        """Give the number after that of any checkpoint, whole or not: folders are used once."""
        return 1 + max(map(_index_of, self._numbered()), default=-1)

    def leftovers(self, before: str) -> list[str]:
        """Name the checkpoints before another that were begun and never committed.

        One whose manifest is there and damaged is not among them: it is for people to look at.
        """
        old = [name for name in self._numbered() if _index_of(name) < _index_of(before)]
        files = [self._inside(name, MANIFEST) for name in old]
        infos = self.filesystem.get_file_info(files)
        missing = pafs.FileType.NotFound
        return [name for name, info in zip(old, infos, strict=True) if info.type == missing]

    def manifest_of(self, checkpoint: str) -> Manifest | None:
        """Read a checkpoint's manifest; None where it is not committed."""
        text = self.read(f"{checkpoint}/{MANIFEST}")
        try:
            return Manifest.from_json(text) if text is not None else None
        except (ValueError, TypeError, KeyError):
            return None  # it was not written to its end

    def damage_of(self, checkpoint: str, files: Iterable[Stored]) -> str | None:
        """Say what is wrong with files of a committed checkpoint; reads all of them."""
        for file in files:
            path = self._inside(checkpoint, file.name)
            try:
                size, checksum = self._sum_of(path)
            except FileNotFoundError:
                return f"{path} is gone"
            if size != file.size:
                return f"{path} has {size:,} bytes, and had {file.size:,}"
            if checksum != file.checksum:
                return f"{path} has been changed"
        return None

    def checkpoint(self, name: str) -> Checkpoint:
        """Give a checkpoint by its name."""
        return Checkpoint(f"{self.path}/{name}", self.filesystem)

    def remove(self, checkpoint: str) -> None:
        """Remove a checkpoint; first its manifest, so that nobody takes half of it for all."""
        manifest = self._inside(checkpoint, MANIFEST)
        if self.filesystem.get_file_info(manifest).type == pafs.FileType.File:
            self.filesystem.delete_file(manifest)
        self.filesystem.delete_dir(f"{self.path}/{checkpoint}")

    def _write(self, file: Path, name: str, checkpoint: str) -> Stored:
        target = self._inside(checkpoint, name)
        self.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        size = checksum = 0
        with file.open("rb") as source, self.filesystem.open_output_stream(target) as stream:
            for chunk in _chunks(source):
                stream.write(chunk)
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        return Stored(name, size, checksum)

    def _sum_of(self, path: str) -> tuple[int, int]:
        size = checksum = 0
        with self.filesystem.open_input_stream(path) as stream:
            for chunk in _chunks(stream):
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        return size, checksum

    def _check_whole(self, checkpoint: str, files: Iterable[Stored]) -> None:
        wanted = {self._inside(checkpoint, file.name): file.size for file in files}
        for info in self.filesystem.get_file_info(list(wanted)):
            if info.type != pafs.FileType.File or info.size != wanted[info.path]:
                found = f"{info.size:,} bytes" if info.type == pafs.FileType.File else "nothing"
                raise DistributorError(
                    f"The checkpoint {checkpoint} is not whole: {wanted[info.path]:,} bytes were "
                    f"written to {info.path}, and there is {found}. Do all nodes see the same "
                    f"storage at {self.path}?"
                )

    def _folders(self) -> list[str]:
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        infos = self.filesystem.get_file_info(selector)
        return [info.base_name for info in infos if info.type == pafs.FileType.Directory]

    def _numbered(self) -> list[str]:
        return sorted(name for name in self._folders() if NUMBERED.fullmatch(name))

    def _inside(self, checkpoint: str, name: str) -> str:
        return f"{self.path}/{checkpoint}/{name}"


def _index_of(checkpoint: str) -> int:
    """Give a checkpoint's number; one that is named otherwise comes before all."""
    found = NUMBERED.fullmatch(checkpoint)
    return int(found[1]) if found else -1


def _chunks(stream: Any) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK):
        yield chunk
