"""The storage of a run's checkpoints: a checkpoint exists once its manifest is written."""

# A checkpoint is a folder with the files of all ranks. First the files are written, each in one
# pass. Then their sizes are checked. Then the manifest is written, which lists them. Nothing is
# appended to, renamed or written twice, because mounted object stores support none of that; only
# the log of the whole run is rewritten, if that is possible. Readers ignore a folder without a
# manifest, and one whose manifest is incomplete.

from __future__ import annotations

import contextlib
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow.fs as pafs

from distributor.core.rank_variables import CheckpointSettings
from distributor.errors import DistributorError
from distributor.filesystems import (
    is_local,
    list_files,
    make_folder,
    native,
    resolve,
    stored_name,
)
from distributor.train.storage.checkpoint import Checkpoint
from distributor.train.storage.files import (
    MANIFEST,
    RESERVED,
    VALIDATION,
    Manifest,
    StoredFile,
    StoredValidation,
    check_sizes,
    files_of,
    identities_of,
    size_and_checksum,
    upload_file,
)

PREFIX = "checkpoint_"
NUMBERED = re.compile(rf"{PREFIX}(\d{{6,}})")
"""The names of checkpoints that the user has not named."""
DAMAGED: Literal["damaged"] = "damaged"
HDFS_WRITERS = 8
"""The number of files that a rank writes to HDFS at a time: to close one often takes 0.5 s."""

Assignment = Callable[[Mapping[str, str]], Iterator[tuple[str, bool]]]
"""Selects, from files by name and identity, those that this rank processes, one at a time.

Each comes with whether this rank uploads it. If not, a different file of the same name is uploaded
by another rank, and this rank only computes the checksum, so that the two can be compared.
"""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The folders of a run."""

    committed: list[tuple[str, Manifest]]  # in the order of reports
    damaged: list[str]  # their manifests are, which a person may be able to repair
    unfinished: list[str]  # numbered checkpoints that were begun and not committed
    next_index: int  # the number of the next checkpoint; a number is never used twice


def _call_in_threads(
    function: Callable[[str, bool], None], items: Iterator[tuple[str, bool]]
) -> None:
    """Call a function with each item, which is taken once a thread is free for it.

    After an error, which is raised, no more items are taken.
    """
    taking, failed = threading.Lock(), threading.Event()

    def work() -> None:
        while not failed.is_set():
            with taking:
                item = next(items, None)
            if item is None:
                return
            try:
                function(*item)
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(HDFS_WRITERS, "writers") as pool:
        calls = []
        try:
            for _ in range(HDFS_WRITERS):
                calls.append(pool.submit(work))
        except RuntimeError:  # no more threads can be started
            work()
        for call in calls:
            call.result()


class Storage:
    """The folder of one run in storage, with its checkpoints.

    `storage_path` is the folder of all runs: a path or an address, which `filesystem` replaces.
    `path` is the run's folder in the file system.
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
        found = zip(names, infos, strict=True)
        existing = [name for name, info in found if info.type == pafs.FileType.File]
        for name in existing:
            self.filesystem.delete_file(paths[name])
        return set(existing)

    # The places of checkpoints

    def contains(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is in the run's folder, at any depth."""
        return self._relative_path(checkpoint) is not None

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        """Return the name of a checkpoint that is directly in the run's folder, otherwise None."""
        path = self._relative_path(checkpoint)
        return None if path is None or "/" in path else path

    def is_inside(self, checkpoint: Checkpoint) -> bool:
        """Return whether the run's folder is a checkpoint's folder, or inside it."""
        paths = self._comparable_paths(checkpoint)
        return paths is not None and f"{paths[0]}/".startswith(f"{paths[1]}/")

    def _relative_path(self, checkpoint: Checkpoint) -> str | None:
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

    # The files of a checkpoint that is being reported

    def upload(
        self,
        folder: str | os.PathLike[str],
        checkpoint: str,
        assignment: Assignment,
        *,
        keep: bool = True,
    ) -> tuple[list[StoredFile], list[StoredFile]]:
        """Upload a rank's files into a checkpoint, which does not exist until it is committed.

        Returns the files that it has uploaded, and those of which another rank uploads another
        version. With `keep`, the folder's files may still be used afterwards, and not only removed.
        """
        self._check_uncommitted(checkpoint)
        files = {
            stored_name(self.filesystem, name): file for name, file in files_of(folder).items()
        }
        root = f"{self.path}/{checkpoint}"
        for target in {f"{root}/{name}".rpartition("/")[0] for name in files}:
            make_folder(self.filesystem, target)
        uploaded: list[StoredFile] = []
        others: list[StoredFile] = []
        assigned = assignment(identities_of(files))

        def process_file(name: str, uploads: bool) -> None:
            if uploads:
                sums = upload_file(files[name], self.filesystem, f"{root}/{name}", keep=keep)
                uploaded.append(StoredFile(name, *sums))
            else:
                sums = size_and_checksum(pafs.LocalFileSystem(), str(files[name]))
                others.append(StoredFile(name, *sums))

        if "hdfs" in self.filesystem.type_name:
            _call_in_threads(process_file, assigned)
        else:  # others buffer whole files in memory, or are not made for several threads
            for name, uploads in assigned:
                process_file(name, uploads)
        return uploaded, others

    def describe(self, checkpoint: str, assignment: Assignment) -> list[StoredFile]:
        """Read the files that ranks have saved in a checkpoint's folder, and describe them.

        Those that another rank uploads are skipped.
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
        """Check that all files of a checkpoint are in storage, and write its manifest."""
        check_sizes(self.checkpoint(checkpoint), manifest.files)
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
        existing = set(list_files(self.filesystem, f"{self.path}/{checkpoint}"))
        if listed <= existing:  # else the file system lists other paths than were written
            self.remove_files([f"{checkpoint}/{name}" for name in existing - listed])

    # Checkpoints

    def checkpoint(self, name: str) -> Checkpoint:
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

    def add_validation(self, checkpoint: str, result: StoredValidation) -> None:
        """Write the result of a validation, by which its metrics join those of the report."""
        self.remove_files([f"{checkpoint}/{VALIDATION}"])  # incomplete
        self.write(f"{checkpoint}/{VALIDATION}", result.to_json())

    def uncommit(self, checkpoint: str) -> None:
        """Remove what makes a checkpoint count, and leave its files."""
        self.remove_files([f"{checkpoint}/{name}" for name in RESERVED])

    def remove(self, checkpoint: str) -> None:
        """Remove a checkpoint: its manifest first, so that no reader sees half of it."""
        self.remove_files([f"{checkpoint}/{MANIFEST}"])
        self.filesystem.delete_dir(native(self.filesystem, f"{self.path}/{checkpoint}"))

    def folders(self) -> list[str]:
        """List the folders in the run's folder, which are its checkpoints."""
        if is_local(self.filesystem):
            with contextlib.suppress(FileNotFoundError):
                return [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
            return []
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        infos = self.filesystem.get_file_info(selector)
        return [info.base_name for info in infos if info.type == pafs.FileType.Directory]


def stored_positions(checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """Read the positions of data loaders from a checkpoint's manifest."""
    if checkpoint is None:
        return {}
    root, _, name = checkpoint.path.rpartition("/")
    manifest = Storage.at(checkpoint.filesystem, root).manifest_of(name)
    return manifest.positions if manifest else {}


def latest_checkpoint(settings: CheckpointSettings, filesystem: Any = None) -> str | None:
    """Return the name of the checkpoint from which a run resumes; None if it has none."""
    committed = Storage(settings.storage_path, settings.name, filesystem).committed()
    return committed[-1][0] if committed else None


def latest_positions(
    settings: CheckpointSettings, filesystem: Any = None, resume_from: Checkpoint | None = None
) -> Mapping[str, Any]:
    """Read the positions from which a run resumes, unless its latest checkpoint is damaged."""
    storage = Storage(settings.storage_path, settings.name, filesystem)
    latest = latest_checkpoint(settings, filesystem)
    return stored_positions(storage.checkpoint(latest) if latest else resume_from)
