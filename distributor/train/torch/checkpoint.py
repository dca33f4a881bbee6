"""`TorchCheckpoint`: a checkpoint with a model, as older programs of Ray Train save it."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributor.train.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


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
