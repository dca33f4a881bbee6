"""The files of a folder as training data, under the names of ``databricks.air.data``.

They follow https://pypi.org/project/databricks-sdk-air, but read any folder or address, and resume
on any number of ranks and workers.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow.fs as pafs
import torch.utils.data as data
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from distributor import runtime
from distributor._compat.torch import forget_workers
from distributor.filesystems import resolve
from distributor.rank.context import worker_context
from distributor.train.runtime.session import has_storage, session

__all__ = ["Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"]

MOUNTS = ("/Volumes/", "/dbfs/")
"""Folders in which each access to a file is a request, so that files are copied first."""
FREE_DISK = 0.1
"""The share of the disk that copies of files leave free."""
WORKERS_PER_RANK, WORKERS_ALONE, WORKERS_PER_CORE = 6, 48, 4
PREFETCHED_BATCHES = 4


@runtime_checkable
class Checkpointable(Protocol):
    """A dataset whose progress can be saved, and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return how far the dataset has been read in this process, as JSON can hold it."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` has returned."""
        ...


class _Stream(NamedTuple):
    """One of the processes that together read a dataset."""

    rank: int
    world_size: int
    worker: int
    num_workers: int

    @classmethod
    def current(cls) -> _Stream:
        worker = data.get_worker_info()
        own = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return cls(runtime.get_global_rank(), runtime.get_world_size(), *own)

    def share(self, files: Sequence[str]) -> Sequence[str]:
        """Return every so many files, so that ranks differ by at most one file."""
        first = self.worker * self.world_size + self.rank
        return files[first :: self.world_size * self.num_workers]


class _Place(NamedTuple):
    """Where a pass over the files is."""

    delivered: int  # files of this process's share
    earlier: list[Any]  # for each earlier start: the ranks, and the files of each of their workers


_START = _Place(0, [])


def _state(place: _Place) -> dict[str, Any]:
    stream = [*_Stream.current()]
    return {"stream": stream, "delivered": place.delivered, "earlier": place.earlier}


def _remaining(files: Sequence[str], earlier: Sequence[Any]) -> Sequence[str]:
    """Return the files that were not read before this process started."""
    for world_size, read in earlier:
        streams = world_size * len(read)
        files = [
            file
            for number, file in enumerate(files)
            if number // streams >= read[number % streams // world_size]
        ]
    return files


class UCVolumeDataset(data.IterableDataset[str]):
    """The files of a folder, divided among ranks and the workers of their data loaders.

    A file that is not on this machine is copied to its disk, and the path of the copy is yielded.
    The copy exists until the next file is asked for, and longer while the disk has room.

    Parameters
    ----------
    path : str or path-like
        A folder, such as a Unity Catalog volume, or an address, such as ``s3://bucket/folder``.
        All files in it are read, in the order of their names, and none of its subfolders.

    Raises
    ------
    ValueError
        If the folder does not exist, or has no files.

    Examples
    --------
    >>> dataset = UCVolumeDataset("/Volumes/main/default/images")  # doctest: +SKIP
    >>> for path in DataLoader(dataset, batch_size=None):  # doctest: +SKIP
    ...     image = read_image(path)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._filesystem, self._folder = resolve(path)
        self._files = self._listed(path)
        self._copies = None if self._is_local() else _Copies()
        self._next = _START  # the start of the next pass
        self._now = _START  # the place of this one

    def __iter__(self) -> Iterator[str]:
        self._now, self._next = self._next, _START
        rest = _remaining(self._files, self._now.earlier)
        return self._read(_Stream.current().share(rest)[self._now.delivered :])

    def _read(self, files: Sequence[str]) -> Iterator[str]:
        for file in files:
            self._now = _Place(self._now.delivered + 1, self._now.earlier)
            yield self._copies.copied(self._filesystem, file) if self._copies else file

    def state_dict(self) -> dict[str, Any]:
        """Return how many files this process has yielded, and what was read before.

        Returns
        -------
        dict
            The state, as JSON can hold it.
        """
        place = self._now if self._next == _START else self._next
        return _state(place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` has returned in the same worker of the same rank.

        A `DataLoader` continues on any number of ranks and workers.

        Parameters
        ----------
        state_dict : dict
            The state.

        Raises
        ------
        ValueError
            If it is that of another worker or rank, or there were others.
        """
        saved, own = _Stream(*state_dict["stream"]), _Stream.current()
        if saved != own:
            raise ValueError(
                f"The state is that of {saved}, but this is {own}. A DataLoader of "
                "distributor.air.data continues on any number of ranks and workers."
            )
        self._next = _Place(state_dict["delivered"], state_dict["earlier"])

    def _start_at(self, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Start the next pass at the states of one rank's workers, and return this as a state.

        All ranks had read equally many files with each worker. Without states, start anew.
        """
        self._next = _START
        for first in itertools.islice(states.values(), 1):
            _, world_size, _, num_workers = first["stream"]
            read = [states.get(n, {}).get("delivered", 0) for n in range(num_workers)]
            self._next = _Place(0, [*first["earlier"], [world_size, read]])
        return _state(self._next)

    def _listed(self, path: str | os.PathLike[str]) -> list[str]:
        try:
            infos = self._filesystem.get_file_info(pafs.FileSelector(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"path is '{path}', which is no folder.") from None
        files = sorted(info.path for info in infos if info.type == pafs.FileType.File)
        if not files:
            raise ValueError(f"path is '{path}', and there are no files in this folder.")
        return files

    def _is_local(self) -> bool:
        is_here = isinstance(self._filesystem, pafs.LocalFileSystem)
        return is_here and not f"{self._folder}/".startswith(MOUNTS)


class _Copies:
    """A folder of copies of files, which this process removes when the dataset is gone."""

    def __init__(self) -> None:
        parent = worker_context().scratch or None  # it is removed after a rank that is killed
        self._temporary = tempfile.TemporaryDirectory(prefix="files-", dir=parent)
        self._folder = Path(self._temporary.name)

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder}  # workers do not remove the folder

    def copied(self, filesystem: pafs.FileSystem, file: str) -> str:
        """Return the path of a copy; other ones of this worker go if the disk is nearly full."""
        folder = self._folder / str(_Stream.current().worker)  # workers do not remove each other's
        copy = folder / PurePosixPath(file).name
        if not copy.exists():
            folder.mkdir(exist_ok=True)
            partial = copy.with_name(f"{copy.name}.partial")
            with filesystem.open_input_stream(file) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)
            partial.rename(copy)
        for old in sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime_ns):
            disk = shutil.disk_usage(folder)
            if disk.free >= FREE_DISK * disk.total:
                break
            if old != copy:
                old.unlink()
        return str(copy)


class _Batch(NamedTuple):
    """A batch, and the state of the dataset in the worker that has read it."""

    batch: Any
    worker: int
    state: dict[str, Any]


class _Collate:
    """Adds the worker's state to each batch, so that what is prefetched does not count as read."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset

    def __call__(self, samples: Any) -> _Batch:
        worker = data.get_worker_info()
        dataset: Any = self._dataset if worker is None else worker.dataset
        number = 0 if worker is None else worker.id
        return _Batch(self._collate(samples), number, dataset.state_dict())


class _LoadStates:
    """Has each worker continue from its state."""

    def __init__(self, states: Mapping[int, Any], initialize: Callable[[int], Any] | None) -> None:
        self._states, self._initialize = states, initialize

    def __call__(self, worker: int) -> None:
        if self._initialize is not None:
            self._initialize(worker)
        info: Any = data.get_worker_info()
        if worker in self._states:
            info.dataset.load_state_dict(self._states[worker])


class DataLoader(data.DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` that can continue within an epoch.

    What the training loop has received counts as read; what workers have prefetched does not. In a
    run with storage, each checkpoint has the position of a loader of a `UCVolumeDataset`, and the
    loader continues from it, on any number of ranks and workers.

    Parameters
    ----------
    *args, **kwargs
        As for `torch.utils.data.DataLoader
        <https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader>`_.
    num_workers : int, optional
        By default 6 for each of several ranks and 48 for a single one, and at most 4 for each core
        of this machine.
    prefetch_factor : int, optional
        Batches that each worker reads ahead; by default 4, or none without workers.

    Examples
    --------
    >>> loader = DataLoader(UCVolumeDataset(path), batch_size=None)  # doctest: +SKIP
    >>> for file in loader:  # doctest: +SKIP
    ...     ...
    """

    def __init__(
        self,
        *args: Any,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        **kwargs: Any,
    ) -> None:
        if num_workers is None:
            wanted = WORKERS_PER_RANK if runtime.get_world_size() > 1 else WORKERS_ALONE
            num_workers = min(wanted, WORKERS_PER_CORE * (os.cpu_count() or 1))
        if num_workers and prefetch_factor is None:
            prefetch_factor = PREFETCHED_BATCHES
        how = {"num_workers": num_workers, "prefetch_factor": prefetch_factor, **kwargs}
        super().__init__(*args, **how)
        self._states: dict[int, Any] = {}  # of the workers, at the batch that was yielded last
        self._resumed: dict[int, Any] = {}  # with which the workers start
        self._is_resumed = False  # whether the next pass does not start anew
        if isinstance(self.dataset, Checkpointable):
            self.collate_fn = _Collate(self.collate_fn, self.dataset)
            self._initialize = self.worker_init_fn
        if isinstance(self.dataset, UCVolumeDataset) and has_storage():
            position = session.reporter.register_loader(self.state_dict)
            if position is not None:
                self.load_state_dict(position)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the workers have read, as far as their batches have been received.

        Returns
        -------
        dict
            The state, as JSON can hold it. With a `UCVolumeDataset`, the state of one rank serves
            all ranks that have received equally many batches.

        Raises
        ------
        TypeError
            If the dataset is not `Checkpointable`.
        """
        self._checkpointable("state_dict")
        return {
            "world_size": runtime.get_world_size(),
            "num_workers": self.num_workers,
            "per_worker": {str(worker): state for worker, state in self._states.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` has returned.

        Parameters
        ----------
        state_dict : mapping
            The state.

        Raises
        ------
        TypeError
            If the dataset is not `Checkpointable`.
        ValueError
            If the number of ranks or workers was another one, and the dataset is no
            `UCVolumeDataset`.
        """
        dataset = self._checkpointable("load_state_dict")
        states = {int(worker): state for worker, state in state_dict["per_worker"].items()}
        if isinstance(self.dataset, UCVolumeDataset):
            self._states = {0: self.dataset._start_at(states)}
        else:
            self._check_size(state_dict["world_size"], state_dict["num_workers"])
            self._states, self._resumed = dict(states), states
            if self.num_workers == 0 and states:
                dataset.load_state_dict(states[0])
        self._is_resumed = True
        forget_workers(self)  # they are elsewhere

    def _check_size(self, world_size: int, num_workers: int) -> None:
        own = runtime.get_world_size(), self.num_workers
        if (world_size, num_workers) != own:
            raise ValueError(
                f"The state is that of {world_size} ranks with {num_workers} workers each, and now "
                f"there are {own[0]} with {own[1]}. Continue with as many as before; a "
                "UCVolumeDataset continues with any number."
            )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not isinstance(self.dataset, Checkpointable):
            return super().__iter__()
        if not self._is_resumed:
            self._states.clear()  # of a pass that was left
        self._is_resumed = False
        self.worker_init_fn = _LoadStates(self._resumed, self._initialize)
        batches = super().__iter__()  # the workers have started, each with a copy of the dataset
        self._resumed = {}
        if isinstance(self.dataset, UCVolumeDataset):
            self.dataset._start_at({})
        return self._received(batches)

    def _received(self, batches: Iterator[_Batch]) -> Iterator[Any]:
        resharded = isinstance(self.dataset, UCVolumeDataset)
        for number, each in enumerate(batches):
            if resharded and number == 0:
                self._states.clear()  # they are of other workers
            self._states[each.worker] = each.state
            yield each.batch
        self._states.clear()  # the next pass starts anew

    def _checkpointable(self, method: str) -> Checkpointable:
        if not isinstance(self.dataset, Checkpointable):
            raise TypeError(
                f"{method} needs a dataset with the methods state_dict and load_state_dict, but "
                f"the dataset is {type(self.dataset).__name__}."
            )
        return self.dataset


class UCVolumeWriter(FileSystemWriter):
    """Writes a distributed checkpoint to a folder, as torch's ``FileSystemWriter``.

    Parameters
    ----------
    path : str or path-like
        The folder, such as one in a Unity Catalog volume.
    **kwargs
        As for ``torch.distributed.checkpoint.FileSystemWriter``.

    Examples
    --------
    >>> writer = UCVolumeWriter("/Volumes/main/default/run")  # doctest: +SKIP
    >>> torch.distributed.checkpoint.save(state, storage_writer=writer)  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(_folder("UCVolumeWriter", path), **kwargs)


class UCVolumeReader(FileSystemReader):
    """Reads a distributed checkpoint from a folder, as torch's ``FileSystemReader``.

    Parameters
    ----------
    path : str or path-like
        The folder, such as one in a Unity Catalog volume.
    **kwargs
        As for ``torch.distributed.checkpoint.FileSystemReader``.

    Examples
    --------
    >>> reader = UCVolumeReader("/Volumes/main/default/run")  # doctest: +SKIP
    >>> torch.distributed.checkpoint.load(state, storage_reader=reader)  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(_folder("UCVolumeReader", path), **kwargs)


def _folder(name: str, path: str | os.PathLike[str]) -> str:
    if "://" in (text := os.fspath(path)):
        raise ValueError(
            f"{name} needs a folder, but path is {text!r}. Report the checkpoint with "
            "distributor.train.report, which copies it to a storage_path with such an address."
        )
    return text
