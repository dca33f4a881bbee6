"""Training with PyTorch, under the names of ``ray.train.torch``."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from distributor import runtime
from distributor.rank.context import device, worker_context
from distributor.settings import in_, must_be
from distributor.train.config import TorchConfig
from distributor.train.storage.checkpoint import Checkpoint
from distributor.train.trainer import TorchTrainer
from distributor.train.worker_loop import ensure_group

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

__all__ = [
    "State",
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]
_MIXED_PRECISION = (
    "accelerate, prepare_optimizer and backward are deprecated in Ray Train too. Use torch.amp "
    "directly, or a library such as Lightning, Transformers or Accelerate."
)


def __getattr__(name: str) -> Any:
    if name == "State":  # importing this package does not import torch
        from distributor.train.torch.recovery import State

        return State
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def get_device() -> torch.device:
    """Return this rank's device: its GPU if it has one, else the CPU.

    Follows ``ray.train.torch.get_device``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.get_device.html

    Returns
    -------
    torch.device
        The device.

    Examples
    --------
    >>> batch = batch.to(get_device())
    """
    return device()


def get_devices() -> list[torch.device]:
    """Return a list with this rank's only device.

    Follows ``ray.train.torch.get_devices``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.get_devices.html

    Returns
    -------
    list of torch.device
        The device that `get_device` returns.

    Examples
    --------
    >>> [device] = get_devices()
    """
    return [device()]


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: Literal["ddp", "fsdp"] | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Move a model to this rank's device, and wrap it for training together with other ranks.

    Follows ``ray.train.torch.prepare_model``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.prepare_model.html

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    move_to_device : bool or torch.device, default True
        Whether to move the model to this rank's device, or the device to move it to.
    parallel_strategy : "ddp", "fsdp" or None, default "ddp"
        Wrap the model in DistributedDataParallel, in FullyShardedDataParallel, or not. A single
        rank needs no wrapper, and gets none.
    parallel_strategy_kwargs : mapping of str to object, optional
        Further arguments of the wrapper's class; by default none.

    Returns
    -------
    torch.nn.Module
        The model, wrapped or not.

    Raises
    ------
    ValueError
        If `parallel_strategy` is another one.

    Examples
    --------
    >>> model = prepare_model(torch.nn.Linear(8, 1), parallel_strategy_kwargs={"bucket_cap_mb": 50})
    """
    is_known = in_("ddp", "fsdp", None)
    must_be("'ddp', 'fsdp' or None", is_known)("parallel_strategy", parallel_strategy)
    target = device() if isinstance(move_to_device, bool) else move_to_device
    if move_to_device:
        model = model.to(target)
    if parallel_strategy is None or runtime.get_world_size() == 1:
        return model
    ensure_group()
    options = dict(parallel_strategy_kwargs or {})
    membership = worker_context().membership
    if membership is not None and parallel_strategy == "fsdp":
        membership.refuse("the model is in FSDP")
    elif membership is not None:
        from distributor.train.torch.recovery import replicated

        if (replica := replicated(model, membership, options)) is not None:
            return replica
    if parallel_strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        devices = {"device_ids": [target]} if target.type == "cuda" else {}
        return DistributedDataParallel(model, **{**devices, **options})
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, **{"device_id": target, **options})


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    keep_global_batch: bool = False,
) -> Any:
    """Return a data loader that yields this rank's share of the dataset, on this rank's device.

    Each checkpoint that is reported contains the loader's position in the epoch. After a restart,
    on any number of ranks, the first pass of the same epoch resumes there: no sample is trained
    twice, and none is left out. (If the size of an epoch is not divisible by the number of ranks,
    some samples are repeated at its end, as in torch's DistributedSampler.) The batch that is being
    processed when ``report`` is called counts as trained.

    A dataset that `DatasetShard.dataset` or `DatasetShard.iterable` returns is this rank's share
    already, and is left whole. The passes of a loader of a `DatasetShard.dataset` are passes of the
    shard, whose position they have. Inside a ``Subset`` or ``ConcatDataset``, it resumes within the
    epoch on the same number of ranks only; on another number the epoch begins again.

    Follows ``ray.train.torch.prepare_data_loader``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.prepare_data_loader.html

    Parameters
    ----------
    data_loader : torch.utils.data.DataLoader
        A loader of a dataset with a known length, sequential or shuffled. If it has a sampler of
        another kind and there are several ranks, they shuffle the dataset instead, with a warning.
    add_dist_sampler : bool, default True
        Whether to shard the dataset. If False, the loader's own sampler is kept.
    move_to_device : bool, default True
        Whether to move batches to this rank's device.
    auto_transfer : bool, default True
        Whether to overlap that with training, through pinned memory.
    keep_global_batch : bool, default False
        Whether the ranks that go on without a lost one, with ``recovery="in_place"``, have larger
        batches, so that those of all ranks together have as many samples as at the start (rounded
        up).

    Returns
    -------
    iterable
        The prepared loader, with the attributes of a DataLoader. Call its ``sampler.set_epoch`` to
        set the epoch of the next pass, which determines the order; by default it is the epoch after
        that of the last pass.

    Raises
    ------
    ValueError
        If the loader has a batch sampler of its own, which would be discarded.

    Examples
    --------
    >>> loader = prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    >>> for epoch in range(2):
    ...     for batch in loader:
    ...         ...
    """
    from distributor.train.torch.loaders import prepare

    target = device() if move_to_device else None
    return prepare(data_loader, add_dist_sampler, target, auto_transfer, keep_global_batch)


def enable_reproducibility(seed: int = 0) -> None:
    """Seed the random generators of this process, and make torch choose deterministic algorithms.

    Each rank has the same seed: use the rank where ranks should draw different numbers.

    Follows ``ray.train.torch.enable_reproducibility``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.enable_reproducibility.html

    Parameters
    ----------
    seed : int, default 0
        The seed for torch, NumPy and ``random``.

    Examples
    --------
    >>> def train_func():
    ...     enable_reproducibility(seed=7)
    """
    import random

    import numpy
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as deterministic cuBLAS needs it


class TorchCheckpoint(Checkpoint):
    """A checkpoint with a model, or its state dict, in one file.

    Deprecated, as in Ray Train: save the file, and use `Checkpoint`.

    Follows ``ray.train.torch.TorchCheckpoint``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.TorchCheckpoint.html

    Parameters
    ----------
    path : str or path
        The folder, or its address.
    filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        The file system of `path`; by default the one that the path names.

    Examples
    --------
    >>> checkpoint = TorchCheckpoint.from_state_dict(model.state_dict())
    >>> model = checkpoint.get_model(torch.nn.Linear(8, 1))
    """

    MODEL_FILENAME = "model.pt"

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        warnings.warn(
            "TorchCheckpoint is deprecated in Ray Train too: save the state dict in a folder, and "
            "use Checkpoint.from_directory.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(path, filesystem)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> TorchCheckpoint:
        """Save a state dict in a new temporary folder.

        Parameters
        ----------
        state_dict : mapping of str to object
            The state dict. A prefix ``module.``, which DistributedDataParallel adds, is removed.

        Returns
        -------
        TorchCheckpoint
            The checkpoint.
        """
        return cls._save({k.removeprefix("module."): v for k, v in state_dict.items()})

    @classmethod
    def from_model(cls, model: torch.nn.Module) -> TorchCheckpoint:
        """Pickle a model into a new temporary folder.

        Parameters
        ----------
        model : torch.nn.Module
            The model.

        Returns
        -------
        TorchCheckpoint
            The checkpoint.
        """
        return cls._save(model)

    @classmethod
    def _save(cls, content: object) -> TorchCheckpoint:
        import torch

        folder = tempfile.mkdtemp(prefix="checkpoint-")
        torch.save(content, os.path.join(folder, cls.MODEL_FILENAME))
        return cls(folder)

    def get_model(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        """Load the model. It is unpickled, so the checkpoint must be trusted.

        Parameters
        ----------
        model : torch.nn.Module, optional
            The model that a state dict is loaded into; needed only for a state dict.

        Returns
        -------
        torch.nn.Module
            The model, on the CPU.

        Raises
        ------
        RuntimeError
            If the checkpoint has no file of this class.
        ValueError
            If it has a state dict, and `model` is None.
        FileNotFoundError
            If the checkpoint does not exist.
        """
        import torch

        with self.as_directory() as folder:
            file = os.path.join(folder, self.MODEL_FILENAME)
            if not os.path.exists(file):
                raise RuntimeError(
                    f"{self} has no {self.MODEL_FILENAME}: it was made neither by from_state_dict "
                    "nor by from_model."
                )
            saved = torch.load(file, map_location="cpu", weights_only=False)
        if isinstance(saved, torch.nn.Module):
            if model is not None:
                warnings.warn("The checkpoint has the whole model: model is ignored.", stacklevel=2)
            return saved
        if model is None:
            raise ValueError("The checkpoint has a state dict: pass the model to load it into.")
        model.load_state_dict(saved)
        return model


def accelerate(amp: bool = False) -> None:
    """Raise an error: mixed precision is torch's own.

    Follows ``ray.train.torch.accelerate``, which is deprecated:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.accelerate.html

    Raises
    ------
    DeprecationWarning
        Always; says what to use instead.
    """
    raise DeprecationWarning(_MIXED_PRECISION)


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Raise an error: mixed precision is torch's own.

    Follows ``ray.train.torch.prepare_optimizer``, which is deprecated:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.prepare_optimizer.html

    Raises
    ------
    DeprecationWarning
        Always; says what to use instead.
    """
    raise DeprecationWarning(_MIXED_PRECISION)


def backward(tensor: torch.Tensor) -> None:
    """Raise an error: mixed precision is torch's own.

    Follows ``ray.train.torch.backward``, which is deprecated:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.backward.html

    Raises
    ------
    DeprecationWarning
        Always; says what to use instead.
    """
    raise DeprecationWarning(_MIXED_PRECISION)
