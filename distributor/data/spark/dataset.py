"""Spark DataFrames among the arguments of a run, which ranks receive as shards."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distributor.data.equal_shares import Equal, check_equal


@dataclass(frozen=True, eq=False)
class SparkDataset:
    """A Spark DataFrame together with how ranks share it, as `from_spark` returns it.

    Parameters
    ----------
    frame : DataFrame
        The DataFrame.
    equal : "drop", "pad" or False
        How ranks get equally many rows.
    split : bool
        Whether the ranks share the rows.
    name : str
        Its name, for messages. If it is empty, it is named by its place among the arguments.
    """

    frame: Any
    equal: Equal
    split: bool
    name: str = ""


def from_spark(frame: Any, *, equal: Equal = "pad", split: bool = True) -> SparkDataset:
    """Set how the ranks of a run share a Spark DataFrame.

    Pass the result to a run in place of the DataFrame. A DataFrame that is passed as it is has the
    default values of the parameters.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        A DataFrame of the active session, classic or Connect.
    equal : "pad", "drop" or False, default "pad"
        How all ranks get the same number of rows, if it is not divisible by the number of ranks:
        some ranks read one row twice, or fewer rows than there are ranks are dropped. If False,
        some ranks have one row more than others.
    split : bool, default True
        Whether the ranks share the rows. If not, each rank reads all of them.

    Returns
    -------
    SparkDataset
        The argument for the run. Its ranks receive a `DatasetShard`.

    Raises
    ------
    TypeError
        If `frame` is not a DataFrame, or `split` not a bool.
    ValueError
        If `equal` is another value, or `frame` is a streaming DataFrame.

    Examples
    --------
    >>> test = from_spark(test_df, equal=False)  # doctest: +SKIP
    >>> TorchDistributor(2, use_gpu=False).run(train, train_df, test)  # doctest: +SKIP
    """
    if not is_dataframe(frame):
        raise TypeError(
            f"from_spark takes a Spark DataFrame, but got an object of type {_type_name(frame)}."
        )
    check_equal(equal)
    if not isinstance(split, bool):
        raise TypeError(f"split must be True or False, but is {split!r}.")
    _check_batch(frame)
    return SparkDataset(frame, equal, split)


def is_dataframe(value: object) -> bool:
    """Return whether a value is a Spark DataFrame. PySpark is not imported for that."""
    return "pyspark.sql" in sys.modules and _is_dataframe_type(type(value))  # type: ignore[arg-type]


@functools.lru_cache
def _is_dataframe_type(kind: type) -> bool:
    return any(
        base.__name__ == "DataFrame" and base.__module__.startswith("pyspark.sql")
        for base in kind.__mro__
    )


def _check_batch(frame: Any) -> None:
    if frame.isStreaming:
        raise ValueError(
            "A streaming DataFrame has no end, so ranks cannot share its rows. Write a part of it "
            "to storage, and pass that: spark.read.parquet(...)."
        )


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


@dataclass(frozen=True)
class ShardReference:
    """Stands for a DataFrame among the pickled arguments of a run; loads as this rank's shard.

    Parameters
    ----------
    number : int
        The number of the dataset.
    """

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_shard, (self.number,)


def _open_shard(number: int) -> Any:
    from distributor.data.spark.chunk_file import open_shard

    return open_shard(number)


class DatasetFinder:
    """Finds the DataFrames among the arguments of a run, and puts references in their place.

    Attributes
    ----------
    datasets : list of SparkDataset
        What was found. A DataFrame that is found twice is one dataset.
    """

    def __init__(self) -> None:
        self.datasets: list[SparkDataset] = []
        self._numbers: dict[int, int] = {}

    def replace_in(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with references in place of DataFrames.

        They are found among the arguments themselves and in lists, tuples and dicts.
        """
        if "pyspark.sql" not in sys.modules:
            return args, dict(kwargs)
        positional = [self._replaced(value, f"argument {at}") for at, value in enumerate(args)]
        named = {name: self._replaced(value, name) for name, value in kwargs.items()}
        return tuple(positional), named

    def add(self, dataset: SparkDataset, name: str) -> ShardReference:
        """Add a dataset, unless it has been found before, and return its reference."""
        number = self._numbers.setdefault(id(dataset.frame), len(self.datasets))
        if number == len(self.datasets):
            _check_batch(dataset.frame)
            self.datasets.append(replace(dataset, name=dataset.name or name))
        return ShardReference(number)

    def _replaced(self, value: Any, name: str) -> Any:
        if isinstance(value, SparkDataset):
            return self.add(value, name)
        if is_dataframe(value):
            return self.add(SparkDataset(value, "pad", True), name)
        if type(value) is dict:
            parts = {key: self._replaced(part, f"{name}[{key!r}]") for key, part in value.items()}
            return parts if _differ(parts.values(), value.values()) else value
        if type(value) in (list, tuple):
            items = [self._replaced(part, f"{name}[{at}]") for at, part in enumerate(value)]
            return type(value)(items) if _differ(items, value) else value
        return value


def _differ(new: Any, old: Any) -> bool:
    return any(one is not other for one, other in zip(new, old, strict=True))
