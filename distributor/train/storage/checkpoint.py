"""A checkpoint: a folder of files, on this machine or in shared storage."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from distributor.core.files import atomic_path, local_path, private_folder, try_lock
from distributor.filesystems import is_local, list_files, local_name, native, resolve
from distributor.node.cache import is_current_lock, open_lock

Download = Callable[[Path], object]
"""Copies the remote folder into a folder of this machine, which it makes."""


@contextlib.contextmanager
def shared_download(name: str, download: Download) -> Iterator[Path]:
    """Provide a copy of a remote folder, until the last process of this user has left the context.

    `name` identifies what is copied. If `download` fails, each of the other processes tries itself.
    """
    root = _root_folder()
    if root is None:
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            download(Path(folder))
            yield Path(folder)
        return
    _remove_unused(root)
    while True:
        with _LocalCopy(root, name) as copy:
            if copy.acquire(download):
                yield copy.folder
                return


def _root_folder() -> Path | None:
    """Return the folder of this user's copies; None if it or locks in it cannot be had."""
    folder = Path(tempfile.gettempdir(), f"distributor-checkpoints-{os.getuid()}")
    try:
        descriptor = os.open(private_folder(folder), os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return folder
        finally:
            os.close(descriptor)
    except OSError:
        return None


def _remove_unused(root: Path) -> None:
    """Remove the copies whose processes have all been killed."""
    for lock in root.glob("*.lock"):
        with _LocalCopy(root, lock.stem):
            pass  # its exit removes a copy that nobody uses


class _LocalCopy:
    """A copy's folder and lock files; the last process to leave the context removes them.

    The folder has its name only while it is complete.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / name
        self._partial = root / f"{name}.partial"
        self._lock_file = root / f"{name}.lock"
        self._download_lock_file = root / f"{name}.download-lock"
        self._lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> _LocalCopy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if try_lock(self._lock) and is_current_lock(self._lock, self._lock_file):
                self._remove()
        finally:
            os.close(self._lock)

    def acquire(self, download: Download) -> bool:
        """Wait for the copy or make it, and hold a shared lock on it.

        Returns False if another process has removed the copy before this one got the lock.
        """
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # waits for a process that removes it
        if not is_current_lock(self._lock, self._lock_file):
            return False
        if not self.folder.exists():
            with open_lock(self._download_lock_file) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that makes it
                if not self.folder.exists():
                    with atomic_path(self.folder, self._partial) as partial:
                        download(partial)
        return True

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._partial)  # a killed process leaves no incomplete folder
        shutil.rmtree(self._partial, ignore_errors=True)
        self._download_lock_file.unlink(missing_ok=True)
        self._lock_file.unlink(missing_ok=True)


METADATA = ".metadata.json"  # as in Ray Train


class _Mode(enum.Enum):
    """A mode, which may be given by its name, in upper or lower case."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None


class CheckpointUploadMode(_Mode):
    """Whether and when `distributor.train.report` uploads a checkpoint.

    Follows ``ray.train.CheckpointUploadMode``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.CheckpointUploadMode.html

    Attributes
    ----------
    SYNC
        The checkpoint is uploaded before ``report`` returns.
    ASYNC
        The checkpoint is uploaded in the background.
    NO_UPLOAD
        The ranks have saved the checkpoint in storage themselves.

    Examples
    --------
    >>> CheckpointUploadMode("ASYNC")
    <CheckpointUploadMode.ASYNC: 'ASYNC'>
    """

    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Return whether ``report`` removes the local folder in this mode by default."""
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(_Mode):
    """What `distributor.train.get_all_reported_checkpoints` waits for.

    Follows ``ray.train.CheckpointConsistencyMode``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.CheckpointConsistencyMode.html

    Attributes
    ----------
    COMMITTED
        The checkpoints exist.
    VALIDATED
        The checkpoints exist, and those to be validated are.

    Examples
    --------
    >>> CheckpointConsistencyMode("COMMITTED")
    <CheckpointConsistencyMode.COMMITTED: 'COMMITTED'>
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(enum.Enum):
    """What has become of a reported checkpoint.

    Follows ``ray.train.ReportedCheckpointStatus``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ReportedCheckpointStatus.html

    Attributes
    ----------
    COMMITTED
        It exists, and no validation was requested.
    PENDING_VALIDATION, VALIDATED, VALIDATION_TIMEOUT, VALIDATION_FAILED
        A validation was requested: it is to come, has succeeded, took too long, or failed.

    Examples
    --------
    >>> ReportedCheckpointStatus.COMMITTED.name
    'COMMITTED'
    """

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


class Checkpoint:
    """A folder of files; their format is up to the training function.

    Follows ``ray.train.Checkpoint``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.Checkpoint.html

    Parameters
    ----------
    path : str or path
        The folder, or its address, such as ``s3://bucket/run/checkpoint_000003``.
    filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        The file system of `path`; by default the one that the path names.

    Attributes
    ----------
    path : str
        The folder in `filesystem`.
    filesystem : pyarrow.fs.FileSystem
        The file system.

    Raises
    ------
    TypeError
        If `filesystem` is not a file system of pyarrow or fsspec.
    ValueError
        If no file system is known for the address.

    Examples
    --------
    >>> checkpoint = Checkpoint("s3://bucket/runs/mnist/checkpoint_000003")
    >>> with checkpoint.as_directory() as folder:
    ...     state = torch.load(f"{folder}/model.pt")
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        self.filesystem, self.path = resolve(path, filesystem)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Return a checkpoint that is a folder of this machine; nothing is copied.

        Parameters
        ----------
        path : str or path
            The folder.
        """
        return cls(path, pafs.LocalFileSystem())

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Provide the checkpoint as a folder of this machine, for the duration of the context.

        A remote checkpoint is copied to a temporary folder. Processes of one node that load it at
        the same time share the copy, so do not modify it.

        Yields
        ------
        str
            The folder.

        Raises
        ------
        FileNotFoundError
            If the checkpoint does not exist.
        """
        self.check_exists()
        if is_local(self.filesystem):
            yield self.path
        else:
            name = f"checkpoint-{self._identity()}"
            with shared_download(name, self.to_directory) as folder:
                yield str(folder)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the checkpoint into a folder of this machine.

        Parameters
        ----------
        path : str or path, optional
            The folder, which is made if necessary; by default a new temporary one.

        Returns
        -------
        str
            The folder.

        Raises
        ------
        FileNotFoundError
            If the checkpoint does not exist.
        """
        chosen = tempfile.mkdtemp(prefix="checkpoint-") if path is None else local_path(path)
        folder = os.path.normpath(chosen)
        os.makedirs(folder, exist_ok=True)
        self.check_exists()
        if is_local(self.filesystem):
            shutil.copytree(self.path, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
        else:
            _download(self.filesystem, self.path, folder)
        return folder

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata that `set_metadata` wrote; empty if there is none."""
        file = native(self.filesystem, f"{self.path}/{METADATA}")
        if self.filesystem.get_file_info(file).type != pafs.FileType.File:
            return {}
        with self.filesystem.open_input_stream(file) as stream:
            metadata: dict[str, Any] = json.loads(stream.read())
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Write metadata into the checkpoint, replacing what is there.

        Parameters
        ----------
        metadata : mapping of str to object
            The metadata.

        Raises
        ------
        TypeError
            If it is not JSON-serializable.
        """
        text = json.dumps(dict(metadata))  # before the file is opened, and so truncated
        file = native(self.filesystem, f"{self.path}/{METADATA}")
        with self.filesystem.open_output_stream(file) as stream:
            stream.write(text.encode())

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata, replacing values of the same names; raises as `set_metadata`."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def check_exists(self) -> None:
        """Raise FileNotFoundError if the checkpoint does not exist."""
        info = self.filesystem.get_file_info(native(self.filesystem, self.path))
        if info.type != pafs.FileType.Directory:
            raise FileNotFoundError(f"There is no checkpoint at {self.path}.")

    def _identity(self) -> str:
        # The same in all processes, as long as the files are the same.
        infos = self.filesystem.get_file_info(pafs.FileSelector(self.path, recursive=True))
        infos = [info for info in infos if info.type == pafs.FileType.File]
        files = [(info.path, info.size, info.mtime_ns) for info in infos]
        try:
            filesystem = pickle.dumps(self.filesystem)
        except Exception:
            filesystem = os.urandom(16)  # it cannot be compared with those of other processes
        return hashlib.sha256(filesystem + repr((self.path, sorted(files))).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Checkpoint(filesystem={self.filesystem.type_name}, path={self.path})"

    def __fspath__(self) -> str:
        raise TypeError(
            "A Checkpoint is no path: use Checkpoint.as_directory() or Checkpoint.to_directory()."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self.path == other.path and self.filesystem.equals(other.filesystem)

    def __hash__(self) -> int:
        return hash(self.path)


def _download(filesystem: pafs.FileSystem, path: str, folder: str) -> None:
    """Copy a folder of another file system, with the names that its files had on their machine."""
    here = pafs.LocalFileSystem()
    names = {name: local_name(name) for name in list_files(filesystem, path)}
    if all(name == own for name, own in names.items()):
        into = pafs.SubTreeFileSystem(os.fsencode(folder), here)
        pafs.copy_files(path, "", filesystem, into)  # several files at a time
        return
    for name, own in names.items():
        target = os.path.join(folder, own)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with filesystem.open_input_stream(f"{path}/{name}") as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file)


@dataclass
class ReportedCheckpoint:
    """A checkpoint that exists, and the metrics that were reported with it.

    Follows ``ray.train.ReportedCheckpoint``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.ReportedCheckpoint.html

    Parameters
    ----------
    checkpoint : Checkpoint
        The checkpoint.
    metrics : dict of str to object
        The metrics of rank 0.
    status : ReportedCheckpointStatus, default ReportedCheckpointStatus.COMMITTED
        Whether it has been validated.

    Examples
    --------
    >>> best = min(get_all_reported_checkpoints(), key=lambda each: each.metrics["loss"])
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED
