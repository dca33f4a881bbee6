"""Datasets under Ray Train's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from distributor.core.spelling import suggestion
from distributor.data.dataframes import SparkDataset, is_dataframe
from distributor.settings.types import any_of, in_, instance_of, must_be
from distributor.train.runtime.session import session

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard

TRAIN_DATASET_KEY = "train"
"""The name of the training data among the datasets of `TorchTrainer`, as in ``ray.train``."""
_check_split = must_be(
    "'all' or a list of names of datasets", any_of(in_("all"), instance_of(list)), TypeError
)


class DataConfig:
    """How the datasets of a `TorchTrainer` are split among the ranks.

    As in Ray Train, each rank gets the same number of rows of a dataset that is split, and the
    rows that are left over are dropped: fewer than there are ranks.

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
        _check_split("datasets_to_split", datasets_to_split)
        self.datasets_to_split = datasets_to_split
        self.execution_options = execution_options
        self.enable_shard_locality = enable_shard_locality

    def datasets_of(self, datasets: Mapping[str, Any]) -> dict[str, Any]:
        """Return the datasets of a trainer, with how ranks share those that are DataFrames.

        Raises
        ------
        TypeError
            If a name is no string, or a dataset of another type.
        ValueError
            If `datasets_to_split` has a name that no dataset has.
        """
        names = list(datasets) if self.datasets_to_split == "all" else self.datasets_to_split
        if unknown := [name for name in names if name not in datasets]:
            raise ValueError(
                f"datasets_to_split has {unknown}, but TorchTrainer(datasets=...) has "
                f"{sorted(datasets)}. {suggestion(unknown[0], datasets)}".rstrip()
            )
        return {name: _dataset(name, value, name in names) for name, value in datasets.items()}


def _dataset(name: str, value: Any, split: bool) -> Any:
    if not isinstance(name, str):
        raise TypeError(f"The names of datasets must be strings, but {name!r} is not.")
    if is_dataframe(value):
        return SparkDataset(value, "drop", split, name)
    if isinstance(value, SparkDataset):
        return replace(value, name=name, split=value.split and split)
    from distributor.data.shard import DatasetShard  # which needs pyarrow

    if isinstance(value, DatasetShard):
        return value
    kind = f"{type(value).__module__}.{type(value).__name__}"
    raise TypeError(
        f"datasets[{name!r}] is of type {kind}. Pass a Spark DataFrame, or "
        "distributor.data.from_parquet(path)."
    )


def get_dataset_shard(dataset_name: str | None = None) -> DatasetShard:
    """Return this rank's part of a dataset of the `TorchTrainer`.

    Follows ``ray.train.get_dataset_shard``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_dataset_shard.html

    Parameters
    ----------
    dataset_name : str, optional
        The name of the dataset, by default "train".

    Returns
    -------
    DatasetShard
        The same object in each call.

    Raises
    ------
    KeyError
        If there is no dataset of this name.
    RuntimeError
        If this process is not a rank of a run.
    """
    session.require_rank("get_dataset_shard")
    name = TRAIN_DATASET_KEY if dataset_name is None else dataset_name
    shards = session.dataset_shards
    if name not in shards:
        known = f"there are {sorted(shards)}" if shards else "the trainer has none"
        raise KeyError(f"There is no dataset {name!r}: {known}. Pass TorchTrainer(datasets=...).")
    return shards[name]
