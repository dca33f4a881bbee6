"""The storage of a run's checkpoints: a checkpoint counts once its manifest is written.

A checkpoint is a folder with the files of all ranks. They are written first, each in one go; then
their sizes are looked at; then the manifest, which lists them. Nothing is appended to, renamed or
written twice, for mounted object stores can do none of that; the record of the whole run alone is
written anew where that can be done. Whoever reads takes a folder without a manifest, or one whose
manifest is cut short, for none.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow.fs as pafs

from distributor.errors import DistributorError
from distributor.train.checkpoint import METADATA, Checkpoint
from distributor.train.storage.filesystems import files_in, is_local, make_folder, resolve
from distributor.train.storage.upload import break_hardlink, brought, size_and_checksum
from distributor.train.storage.upload_shares import Share, everything, identity_of

MANIFEST = ".manifest.json"
RECORD = ".reports.jsonl"
"""What had been reported when a checkpoint was; from here a new attempt goes on."""
OWN = (MANIFEST, RECORD)
"""The files of a checkpoint that no rank saves."""
PREFIX = "checkpoint_"
NUMBERED = re.compile(rf"{PREFIX}(\d+)")
DAMAGED: Literal["damaged"] = "damaged"
READERS = 8
"""Files that are read at the same time: of one alone, an object store gives too little."""


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
        fields = json.dumps(asdict(self))
        return json.dumps({"checksum": zlib.crc32(fields.encode()), "of": fields}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read one; raises ValueError, TypeError or KeyError where it is damaged."""
        told = json.loads(text)
        if zlib.crc32(told["of"].encode()) != told["checksum"]:
            raise ValueError("its checksum is another")
        fields = json.loads(told["of"])
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
        make_folder(self.filesystem, path.rpartition("/")[0])
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

    def upload(
        self,
        folder: str | os.PathLike[str],
        checkpoint: str,
        share: Share = everything,
        *,
        keep: bool = True,
    ) -> list[Stored]:
        """Write a rank's files into a checkpoint, which exists only once it is committed.

        Parameters
        ----------
        folder : str or path
            A folder of this machine.
        checkpoint : str
            The checkpoint's name.
        share : callable
            Chooses which of them this rank writes.
        keep : bool
            Whether the folder's files may be used after this, and not only removed.

        Raises
        ------
        DistributorError
            Where the checkpoint is committed already: nothing that is saved is written over.
        """
        self._check_new(checkpoint)
        root = Path(folder)
        found = sorted(path for path in root.rglob("*") if path.is_file())
        files = {str(path.relative_to(root)): path for path in found}
        for name in OWN:  # of the checkpoint that this folder was before
            files.pop(name, None)
        for target in {self._inside(checkpoint, name).rpartition("/")[0] for name in files}:
            make_folder(self.filesystem, target)
        stored = []
        for name, mine in share({name: identity_of(file) for name, file in files.items()}):
            target = self._inside(checkpoint, name)
            if mine:
                sums = brought(files[name], self.filesystem, target, keep=keep)
            else:
                sums = size_and_checksum(pafs.LocalFileSystem(), str(files[name]))
            stored.append(Stored(name, *sums))
        return stored

    def holds(self, checkpoint: Checkpoint, name: str | None = None) -> bool:
        """Tell whether a checkpoint lies in the run's folder, and by this name."""
        if is_local(self.filesystem) and is_local(checkpoint.filesystem):
            mine, its = os.path.realpath(self.path), os.path.realpath(checkpoint.path)
        elif self.filesystem.equals(checkpoint.filesystem):
            mine, its = self.path, checkpoint.path
        else:
            return False
        return its.startswith(f"{mine}/") if name is None else its == f"{mine}/{name}"

    def described(self, checkpoint: str, share: Share = everything) -> list[Stored]:
        """Describe the files that lie in a checkpoint's folder already; reads all of them.

        Parameters
        ----------
        checkpoint : str
            The checkpoint's name.
        share : callable
            Chooses which of them this rank reads.

        Raises
        ------
        DistributorError
            Where the checkpoint is committed already.
        """
        self._check_new(checkpoint)
        root = f"{self.path}/{checkpoint}"
        found = [info.path[len(root) + 1 :] for info in files_in(self.filesystem, root)]
        names = sorted(set(found).difference(OWN))
        return [
            Stored(name, *size_and_checksum(self.filesystem, f"{root}/{name}"))
            for name, _ in share(dict.fromkeys(names, ""))
        ]

    def commit(self, checkpoint: str, manifest: Manifest) -> None:
        """Make a checkpoint exist, all of whose files are there.

        Raises
        ------
        DistributorError
            Where one is not there, or not whole.
        """
        self._check_whole(checkpoint, manifest.files)
        self._remove_others(checkpoint, manifest.files)
        self.write(f"{checkpoint}/{MANIFEST}", manifest.to_json())

    def committed(self) -> list[tuple[str, Manifest]]:
        """List the checkpoints that exist, and their manifests, in the order of their reports."""
        return self.survey()[0]

    def survey(self) -> tuple[list[tuple[str, Manifest]], list[str]]:
        """List what `committed` does, and name the checkpoints whose manifest is damaged."""
        found = [(name, self._told_in(name)) for name in self._folders()]
        manifests = [(name, told) for name, told in found if isinstance(told, Manifest)]
        damaged = [name for name, told in found if told == DAMAGED]
        return sorted(manifests, key=lambda pair: pair[1].index), damaged

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
        told = self._told_in(checkpoint)
        return told if isinstance(told, Manifest) else None

    def _told_in(self, checkpoint: str) -> Manifest | Literal["damaged"] | None:
        text = self.read(f"{checkpoint}/{MANIFEST}")
        try:
            return Manifest.from_json(text) if text is not None else None
        except (ValueError, TypeError, KeyError):
            return DAMAGED  # it was not written to its end, or has been changed

    def damage_of(self, checkpoint: str, files: Sequence[Stored]) -> str | None:
        """Say what is wrong with files of a committed checkpoint; reads all of them."""
        files = [file for file in files if file.name != METADATA]  # users may add to that
        paths = [self._inside(checkpoint, file.name) for file in files]
        with ThreadPoolExecutor(READERS, "readers") as readers:
            return next(filter(None, readers.map(self._damage_of, paths, files)), None)

    def break_hardlink(self, checkpoint: str, files: Sequence[Stored]) -> None:
        """See to it that nobody can write to files of a checkpoint by another name of theirs."""
        if is_local(self.filesystem):
            for file in files:
                break_hardlink(self._inside(checkpoint, file.name))

    def checkpoint(self, name: str) -> Checkpoint:
        """Give a checkpoint by its name."""
        return Checkpoint(f"{self.path}/{name}", self.filesystem)

    def remove(self, checkpoint: str) -> None:
        """Remove a checkpoint; first its manifest, so that nobody takes half of it for all."""
        manifest = self._inside(checkpoint, MANIFEST)
        if self.filesystem.get_file_info(manifest).type == pafs.FileType.File:
            self.filesystem.delete_file(manifest)
        self.filesystem.delete_dir(f"{self.path}/{checkpoint}")

    def _check_new(self, checkpoint: str) -> None:
        if self.manifest_of(checkpoint) is not None:
            raise DistributorError(
                f"The checkpoint {checkpoint} is already in {self.path}, and is not written over. "
                "Report it under another checkpoint_dir_name."
            )

    def _damage_of(self, path: str, file: Stored) -> str | None:
        info = self.filesystem.get_file_info(path)
        if info.type != pafs.FileType.File:
            return f"{path} is gone"
        if info.size != file.size:
            return f"{path} has {info.size:,} bytes, and had {file.size:,}"
        if size_and_checksum(self.filesystem, path) != (file.size, file.checksum):
            return f"{path} has been changed"
        return None

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

    def _remove_others(self, checkpoint: str, files: Iterable[Stored]) -> None:
        """Remove what an attempt that was killed has left in a checkpoint's folder."""
        wanted = {self._inside(checkpoint, file.name) for file in files}
        found = {info.path for info in files_in(self.filesystem, f"{self.path}/{checkpoint}")}
        if wanted <= found:  # or they are listed by other paths than they were written by
            for path in found - wanted:
                self.filesystem.delete_file(path)

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
