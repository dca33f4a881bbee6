"""The rank of this process, its run, and the notices of preemption, under Ray Train's names."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any, NoReturn

from distributor import runtime
from distributor.train.errors import PreemptionInfo
from distributor.train.runtime.session import session
from distributor.train.storage.checkpoint_store import Storage

_NO_TRIAL = (
    "Trials belong to Ray Tune, and are deprecated in Ray Train too: use get_experiment_name() for "
    "the name of the run, and get_storage() for its folder."
)
_NO_METADATA = (
    "get_metadata() is deprecated in Ray Train too: pass the metadata in train_loop_config, or add "
    "it to the checkpoints with Checkpoint.set_metadata."
)


class StorageContext:
    """The run's folder in storage.

    Follows Ray Train's ``StorageContext``, which ``ray.train.get_context().get_storage()`` returns:
    https://docs.ray.io/en/latest/train/user-guides/checkpoints.html

    Parameters
    ----------
    folder : Storage
        The run's folder.
    custom_fs_provided : bool
        Whether the user has passed a file system for the storage path.

    Attributes
    ----------
    storage_filesystem, filesystem : pyarrow.fs.FileSystem
        The file system of the storage path.
    storage_fs_path : str
        The storage path in it.
    experiment_dir_name : str
        The name of the run, and of its folder in the storage path.
    experiment_fs_path, path : str
        The path of that folder.
    custom_fs_provided : bool
        Whether the user has passed `storage_filesystem`.
    read_only : bool
        Always False.

    Examples
    --------
    >>> def train_func():
    ...     storage = get_context().get_storage()
    ...     path = storage.build_checkpoint_path_from_name("epoch_3")
    ...     dcp.save(state, storage_writer=FileSystemWriter(path))
    ...     report({}, Checkpoint(path), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    """

    read_only = False

    def __init__(self, folder: Storage, custom_fs_provided: bool) -> None:
        self.storage_filesystem = self.filesystem = folder.filesystem
        self.experiment_fs_path = self.path = folder.path
        self.storage_fs_path, _, self.experiment_dir_name = folder.path.rpartition("/")
        self.custom_fs_provided = custom_fs_provided

    @property
    def local_working_directory(self) -> str:
        """The working directory of this process."""
        return os.getcwd()

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return the path that a checkpoint of this name has in storage.

        Names such as ``checkpoint_000003`` are those of checkpoints without a name.
        """
        return f"{self.path}/{checkpoint_name}"

    def extract_checkpoint_dir_name_from_path(self, checkpoint_path: str) -> str:
        """Return the name of a checkpoint from its path in storage.

        Raises
        ------
        ValueError
            If the path is not in the run's folder.
        """
        name = os.fspath(checkpoint_path).removeprefix(f"{self.path}/")
        if name == os.fspath(checkpoint_path):
            raise ValueError(f"{checkpoint_path} is not in the run's folder {self.path}.")
        return name

    @staticmethod
    def make_default_checkpoint_dir_name() -> str:
        """Return a name that no checkpoint has, made of the time."""
        return f"checkpoint_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"

    def persist_current_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError: `distributor.train.report` uploads checkpoints."""
        raise RuntimeError(
            "A checkpoint exists only if all ranks report it: call report(metrics, checkpoint), "
            "which uploads it, or copy it to build_checkpoint_path_from_name(name) in a "
            "checkpoint_upload_fn of report."
        )

    def __repr__(self) -> str:
        return f"StorageContext(filesystem={self.filesystem.type_name}, path={self.path})"


class TrainContext:
    """The rank of this process, and the run that it belongs to.

    In a process that is not a rank, it describes the only rank of a world of size 1.

    Follows ``ray.train.TrainContext``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.TrainContext.html

    Examples
    --------
    >>> context = get_context()
    >>> context.get_world_rank(), context.get_world_size()
    (0, 1)
    """

    def get_world_rank(self) -> int:
        """Return this rank's number among all ranks."""
        return runtime.get_global_rank()

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return runtime.get_world_size()

    def get_local_rank(self) -> int:
        """Return this rank's number on its node."""
        return runtime.get_local_rank()

    def get_local_world_size(self) -> int:
        """Return the number of ranks on this node."""
        return runtime.get_local_world_size()

    def get_node_rank(self) -> int:
        """Return the number of this rank's node."""
        return runtime.get_node_rank()

    def get_experiment_name(self) -> str:
        """Return the name of the training run; the run's id if it has none."""
        return session.run_name

    def get_storage(self) -> StorageContext:
        """Return the run's folder in storage.

        Raises
        ------
        RuntimeError
            If this process is not a rank of a run, or the run has no storage.
        DistributorError
            At the first use in a rank, if the ranks do not share the storage.
        """
        reporter = session.reporter
        return StorageContext(reporter.storage, reporter.custom_filesystem)

    def get_trial_name(self) -> str:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    def get_trial_id(self) -> str:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    def get_trial_dir(self) -> str:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    def get_trial_resources(self) -> Any:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    def get_metadata(self) -> dict[str, Any]:
        """Raise DeprecationWarning: pass metadata to the training function."""
        raise DeprecationWarning(_NO_METADATA)


def get_context() -> TrainContext:
    """Return the rank of this process.

    Follows ``ray.train.get_context``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_context.html

    Returns
    -------
    TrainContext
        The context. It can be used in any process.

    Examples
    --------
    >>> get_context().get_local_rank()
    0
    """
    return TrainContext()


def is_preempted() -> bool:
    """Return whether this run is about to lose a process, so that it can save a checkpoint.

    Returns True once for each notice, at the same call in all ranks. A notice comes when Spark
    begins to decommission an executor on a host of the ranks, when a rank receives SIGTERM, or when
    the driver receives SIGTERM while ``run`` waits on its main thread; the driver then ends after
    the next checkpoint that is reported. Report a checkpoint when this returns True, and continue.

    Every rank must call this equally often, usually once per step. Until a notice comes, a call
    costs next to nothing. A rank that calls it on its main thread survives its first SIGTERM,
    unless the program handles SIGTERM itself. No storage is needed. Nodes without a network link to
    the driver receive no notices, and Spark Connect does not report decommissioning.

    Follows no API of Ray Train, which has no equivalent.

    Returns
    -------
    bool
        Whether a notice is due at this call; False in a process that is not a rank.

    Examples
    --------
    >>> for step in range(3):
    ...     if is_preempted() or step % 100 == 99:
    ...         ...  # save, and report
    """
    return session.is_preempted()


def get_preemption_info() -> PreemptionInfo | None:
    """Return which ranks are about to be preempted, from the same call on in all ranks.

    The same notices as those of `is_preempted`, and they come under the same conditions. Every
    rank must call this equally often; calls of the two functions are counted separately.

    Follows ``ray.train.get_preemption_info``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_preemption_info.html

    Returns
    -------
    PreemptionInfo or None
        The hosts of all notices so far, and their ranks; None before the first notice. The deadline
        is not known.

    Raises
    ------
    RuntimeError
        If this process is not a rank of a run.

    Examples
    --------
    >>> def train_func():
    ...     for step in range(1000):
    ...         info = get_preemption_info()
    ...         if info is not None:
    ...             ...  # save, report, and return
    """
    ranks = session.preempted_ranks()
    return None if ranks is None else PreemptionInfo(None, ranks)
