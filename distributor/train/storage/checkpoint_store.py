"""The storage of a run's checkpoints: a checkpoint exists once its manifest is written.

A checkpoint is a folder with the files of all ranks. First the files are written, each in one
pass. Then their sizes are checked. Then the manifest is written, which lists them. Nothing is
appended to, renamed or written twice, because mounted object stores support none of that; only the
log of the whole run is rewritten, if that is possible. Readers ignore a folder without a manifest,
and one whose manifest is incomplete.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pyarrow.fs as pafs

from distributor.errors import DistributorError
from distributor.filesystems import (
    is_local,
    list_files,
    make_folder,
    native,
    resolve,
    stored_name,
)
from distributor.train.checkpoint import Checkpoint
from distributor.train.storage.integrity import (
    Checksum,
    check_parts,
    check_sizes,
    find_damage,
    read_share,
)
from distributor.train.storage.manifest import (
    MANIFEST,
    RESERVED,
    VALIDATION,
    Manifest,
    StoredFile,
    StoredValidation,
)
from distributor.train.storage.run_folder import RunFolder
from distributor.train.storage.upload import break_hardlink, size_and_checksum, upload_file
from distributor.train.storage.upload_assignment import (
    Assignment,
    assign_all,
    files_of,
    identities_of,
)

T = TypeVar("T")
PREFIX = "checkpoint_"
NUMBERED = re.compile(rf"{PREFIX}(\d{{6,}})")
"""The names of checkpoints that the user has not named."""
DAMAGED: Literal["damaged"] = "damaged"
HDFS_WRITERS = 8
"""The number of files that a rank writes to HDFS at a time: to close one often takes 0.5 s."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The folders of a run.

    Parameters
    ----------
    committed : list of pairs of str and Manifest
        The names and manifests of the checkpoints that exist, in the order of reports.
    damaged : list of str
        The names of checkpoints with a damaged manifest, which a person may be able to repair.
    unfinished : list of str
        The names of numbered checkpoints that were begun and not committed.
    next_index : int
        The number of the next checkpoint; a number is never used twice.
    """

    committed: list[tuple[str, Manifest]]
    damaged: list[str]
    unfinished: list[str]
    next_index: int


class _OneAtATime(Iterator[T]):
    """An iterator whose items several threads take, until one of them stops it."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._is_stopped = False

    def __next__(self) -> T:
        with self._lock:
            if self._is_stopped:
                raise StopIteration
            return next(self._items)

    def stop(self) -> None:
        self._is_stopped = True


def _run_in_threads(function: Callable[[], None], count: int) -> None:
    """Call a function in several threads at once, and raise what it raises."""
    if count <= 1:
        function()
        return
    with ThreadPoolExecutor(count, "writers") as pool:
        calls = []
        try:
            for _ in range(count):
                calls.append(pool.submit(function))
        except RuntimeError:  # Python shuts down, and starts no more threads
            function()
        for call in calls:
            call.result()


class Storage(RunFolder):
    """The checkpoints of one run.

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
        found, root = resolve(storage_path, filesystem)
        super().__init__(found, f"{root}/{name}")

    @classmethod
    def at(cls, filesystem: pafs.FileSystem, path: str) -> Storage:
        """Return the storage in a run's folder."""
        root, _, name = path.rpartition("/")
        return cls(root, name, filesystem)

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
        files = {
            stored_name(self.filesystem, name): file for name, file in files_of(folder).items()
        }
        for target in {self._path(checkpoint, name).rpartition("/")[0] for name in files}:
            make_folder(self.filesystem, target)
        uploaded: list[StoredFile] = []
        others: list[StoredFile] = []
        assigned = _OneAtATime(assignment(identities_of(files)))

        def process(name: str, uploads: bool) -> None:
            if uploads:
                target = self._path(checkpoint, name)
                sums = upload_file(files[name], self.filesystem, target, keep=keep)
                uploaded.append(StoredFile(name, *sums))
            else:
                sums = size_and_checksum(pafs.LocalFileSystem(), str(files[name]))
                others.append(StoredFile(name, *sums))

        def process_all() -> None:
            try:
                for name, uploads in assigned:
                    process(name, uploads)
            except BaseException:
                assigned.stop()
                raise

        # Others buffer whole files in memory, or are not made for several threads.
        is_hdfs = "hdfs" in self.filesystem.type_name
        _run_in_threads(process_all, min(HDFS_WRITERS, len(files)) if is_hdfs else 1)
        return uploaded, others

    def describe(self, checkpoint: str, assignment: Assignment = assign_all) -> list[StoredFile]:
        """Read the files that ranks have saved in a checkpoint's folder, and describe them.

        Parameters
        ----------
        checkpoint : str
            The checkpoint's name.
        assignment : callable
            Selects the files that this rank reads; by default all. Those that another rank uploads
            are skipped.

        Raises
        ------
        DistributorError
            If the checkpoint is already committed.
        """
        self._check_uncommitted(checkpoint)
        root = f"{self.path}/{checkpoint}"
        names = sorted(set(list_files(self.filesystem, root)).difference(RESERVED))
        return [
            StoredFile(name, *size_and_checksum(self.filesystem, f"{root}/{name}"))
            for name, is_ours in assignment(dict.fromkeys(names, ""))
            if is_ours
        ]

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
        listed = {file.name for file in files}
        existing = set(list_files(self.filesystem, self._path(checkpoint)))
        if listed <= existing:  # else the file system lists other paths than were written
            self.remove_files([f"{checkpoint}/{name}" for name in existing - listed])

    # Checkpoints

    def checkpoint(self, name: str) -> Checkpoint:
        """Return a checkpoint by its name."""
        return Checkpoint(f"{self.path}/{name}", self.filesystem)

    def committed(self) -> list[tuple[str, Manifest]]:
        """List the names and manifests of the checkpoints that exist, in the order of reports."""
        return self.survey().committed

    def survey(self) -> Survey:
        """Read all manifests, and return what there is."""
        found = {name: self._read_manifest(name) for name in self.folders()}
        committed = [(name, each) for name, each in found.items() if isinstance(each, Manifest)]
        committed.sort(key=lambda pair: pair[1].index)
        numbers = {name: int(match[1]) for name in found if (match := NUMBERED.fullmatch(name))}
        indices = [*numbers.values(), *(manifest.index for _, manifest in committed)]
        return Survey(
            committed=committed,
            damaged=[name for name, each in found.items() if each == DAMAGED],
            unfinished=sorted(name for name in numbers if found[name] is None),
            next_index=1 + max(indices, default=-1),
        )

    def manifest_of(self, checkpoint: str) -> Manifest | None:
        """Read a checkpoint's manifest; return None if it is not committed or is damaged."""
        manifest = self._read_manifest(checkpoint)
        return manifest if isinstance(manifest, Manifest) else None

    def _read_manifest(self, checkpoint: str) -> Manifest | Literal["damaged"] | None:
        text = self.read(f"{checkpoint}/{MANIFEST}")
        try:
            manifest = Manifest.from_json(text) if text is not None else None
        except (ValueError, TypeError, KeyError):
            return DAMAGED  # incomplete, or modified
        if manifest is None or not manifest.is_pending:
            return manifest
        result = self.read(f"{checkpoint}/{VALIDATION}")
        return manifest.validated(StoredValidation.from_json(result)) if result else manifest

    def is_pending(self, checkpoint: str) -> bool:
        """Return whether a checkpoint is yet to be validated; False if it does not exist."""
        manifest = self.manifest_of(checkpoint)
        return manifest is not None and manifest.is_pending

    def add_validation(self, checkpoint: str, result: StoredValidation) -> None:
        """Write the result of a validation, by which its metrics join those of the report."""
        self.remove_files([f"{checkpoint}/{VALIDATION}"])  # incomplete
        self.write(f"{checkpoint}/{VALIDATION}", result.to_json())

    def find_damage(self, checkpoint: str, files: Sequence[StoredFile]) -> str | None:
        """Read files of a checkpoint completely, and describe the first that is damaged."""
        return find_damage(self.filesystem, self._path(checkpoint), files)

    def read_share(
        self, checkpoint: str, files: Sequence[StoredFile], rank: int, size: int
    ) -> list[Checksum]:
        """Read a rank's share of a checkpoint; see `integrity.read_share`."""
        return read_share(self.filesystem, self._path(checkpoint), files, rank, size)

    def check_parts(
        self, checkpoint: str, files: Sequence[StoredFile], parts: Iterable[Checksum]
    ) -> None:
        """Check files of which ranks have each read a part; see `integrity.check_parts`."""
        check_parts(self._path(checkpoint), files, parts)

    def break_hardlinks(self, checkpoint: str, files: Sequence[StoredFile]) -> None:
        """Ensure that files of a checkpoint cannot be modified through other names of theirs."""
        if is_local(self.filesystem):
            for file in files:
                break_hardlink(self._path(checkpoint, file.name))

    def uncommit(self, checkpoint: str) -> None:
        """Remove what makes a checkpoint count, and leave its files."""
        self.remove_files([f"{checkpoint}/{name}" for name in RESERVED])

    def remove(self, checkpoint: str) -> None:
        """Remove a checkpoint: its manifest first, so that no reader sees half of it."""
        self.remove_files([f"{checkpoint}/{MANIFEST}"])
        self.filesystem.delete_dir(native(self.filesystem, self._path(checkpoint)))

    def folders(self) -> list[str]:
        """List the folders in the run's folder, which are its checkpoints."""
        if is_local(self.filesystem):
            with contextlib.suppress(FileNotFoundError):
                return [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
            return []
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        infos = self.filesystem.get_file_info(selector)
        return [info.base_name for info in infos if info.type == pafs.FileType.Directory]

    def _path(self, checkpoint: str, *names: str) -> str:
        return "/".join((self.path, checkpoint, *names))
