"""Datasets, under Ray Train's names. `TorchTrainer` does not support them yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from distributor.train.runtime.session import session

TRAIN_DATASET_KEY = "train"
"""The name of the training data among the datasets of `TorchTrainer`, as in ``ray.train``."""


class DataConfig:
    """How the datasets of a `TorchTrainer` are split among the ranks.

    It has no effect yet, because ``TorchTrainer(datasets=...)`` is not supported.

    Follows ``ray.train.DataConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.DataConfig.html

    Parameters
    ----------
    datasets_to_split : "all" or list of str, default "all"
        The datasets that are split; each rank has all of the others.
    execution_options : object, optional
        Options of Ray Data, which have no effect here.
    enable_shard_locality : bool, default True
        Has no effect here.

    Raises
    ------
    TypeError
        If `datasets_to_split` is neither "all" nor a list.

    Examples
    --------
    >>> data_config = DataConfig(datasets_to_split=[TRAIN_DATASET_KEY])
    """

    def __init__(
        self,
        datasets_to_split: Literal["all"] | Sequence[str] = "all",
        execution_options: Any = None,
        enable_shard_locality: bool = True,
    ) -> None:
        if datasets_to_split != "all" and not isinstance(datasets_to_split, list):
            raise TypeError(
                "datasets_to_split must be 'all' or a list of names of datasets, but is "
                f"{datasets_to_split!r}."
            )
        self.datasets_to_split = datasets_to_split
        self.execution_options = execution_options
        self.enable_shard_locality = enable_shard_locality


def get_dataset_shard(dataset_name: str | None = None) -> NoReturn:
    """Raise KeyError: ``TorchTrainer(datasets=...)`` is not supported yet.

    Follows ``ray.train.get_dataset_shard``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_dataset_shard.html

    Parameters
    ----------
    dataset_name : str, optional
        The name of the dataset.

    Raises
    ------
    KeyError
        Always in a rank: there is no dataset of any name.
    RuntimeError
        If this process is not a rank of a run.
    """
    session.require_rank("get_dataset_shard")
    raise KeyError(
        f"There is no dataset {dataset_name!r}: TorchTrainer(datasets=...) is not supported yet. "
        "Read the data in train_loop_per_worker, depending on the rank."
    )
