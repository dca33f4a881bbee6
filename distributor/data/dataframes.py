"""Spark DataFrames among the arguments of a run, which ranks receive as shards."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from distributor.data.epochs import Equal
    from distributor.data.shard import DatasetShard


def check_sharing(equal: object, split: object) -> None:
    if equal is not False and equal not in ("drop", "pad"):
        raise ValueError(f"equal must be 'pad', 'drop' or False, but is {equal!r}.")
    if not isinstance(split, bool):
        raise TypeError(f"split must be True or False, but is {split!r}.")


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
        Its name, for messages. If it is empty, it is named by its parameter of the function.
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
            "from_spark takes a Spark DataFrame, but got an object of type "
            f"{type(frame).__module__}.{type(frame).__name__}."
        )
    check_sharing(equal, split)
    _check_batch(frame)
    return SparkDataset(frame, equal, split)


def get_spark_partition_data_loader(
    num_samples: int, batch_size: int, num_workers: int = 1, prefetch_factor: int = 2
) -> DataLoader[Any]:
    """Return a data loader of this rank's rows of the DataFrame, inside ``train_on_dataframe``.

    Each batch is a list with a tensor for each column: float64 for floats, int64 for integers,
    and for arrays and Spark ML vectors a matrix with a row for each sample.

    Follows ``_get_spark_partition_data_loader`` of PySpark's ``pyspark.ml.torch.distributor``.

    Parameters
    ----------
    num_samples : int
        The samples of an epoch: the first rows. If there are fewer rows, they are repeated.
    batch_size : int
        The samples of a batch; the last one may have fewer.
    num_workers : int, default 1
        Processes that load the data; 0 loads it in this process. It is at most 1, as in PySpark.
    prefetch_factor : int, default 2
        Batches that are loaded in advance, if there is a process for it.

    Returns
    -------
    torch.utils.data.DataLoader
        The loader.

    Raises
    ------
    RuntimeError
        If this process is not a rank of a run that was started by ``train_on_dataframe``, or
        `num_workers` is more than 1.
    ValueError
        If a column has another type, or a parameter is not positive.

    Examples
    --------
    >>> for features, labels in get_spark_partition_data_loader(1000, 32):  # doctest: +SKIP
    ...     ...
    """
    from distributor.data.torch_datasets import partition_loader

    return partition_loader(num_samples, batch_size, num_workers, prefetch_factor)


def is_dataframe(value: object) -> bool:
    """Return whether a value is a Spark DataFrame. PySpark is not imported for that."""
    return "pyspark.sql" in sys.modules and any(
        base.__name__ == "DataFrame" and base.__module__.startswith("pyspark.sql")
        for base in type(value).__mro__
    )


def numbered(frame: Any) -> Any:
    """Return a DataFrame with the columns ``c0``, ``c1``, ... for ``mapInArrow``.

    It selects columns by their names, in which a dot, a backtick or * has a meaning, and the case
    may have none.
    """
    return frame.toDF(*(f"c{at}" for at in range(len(frame.columns))))


def vectors_of(frame: Any) -> frozenset[str]:
    """Return the columns of a DataFrame that have vectors of Spark ML."""
    fields = frame.schema.fields
    return frozenset(field.name for field in fields if type(field.dataType).__name__ == "VectorUDT")


def _check_batch(frame: Any) -> None:
    if frame.isStreaming:
        raise ValueError(
            "A streaming DataFrame has no end, so ranks cannot share its rows. Write a part of it "
            "to storage, and pass that: spark.read.parquet(...)."
        )


@dataclass(frozen=True)
class ShardReference:
    """Stands for a DataFrame among the pickled arguments of a run; loads as this rank's shard."""

    number: int  # of the dataset

    def __reduce__(self) -> tuple[Any, ...]:
        return open_shard, (self.number,)


def open_shard(number: int) -> DatasetShard:
    from distributor.data.chunk_file import open_source
    from distributor.data.shard import DatasetShard

    return DatasetShard(*open_source(number))


class DatasetFinder:
    """Finds the DataFrames among the arguments of a run, and puts references in their place."""

    def __init__(self) -> None:
        self.datasets: list[SparkDataset] = []
        self._numbers: dict[tuple[int, Equal, bool], int] = {}

    def replace_in(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], function: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with references in place of DataFrames.

        They are found among the arguments themselves and in lists, tuples and dicts. They are named
        by the parameters of the function, if it is one.
        """
        if "pyspark.sql" not in sys.modules:
            return args, dict(kwargs)
        names = _parameter_names(function, len(args))
        positional = [self._replaced(value, name) for value, name in zip(args, names, strict=True)]
        named = {name: self._replaced(value, name) for name, value in kwargs.items()}
        return tuple(positional), named

    def add(self, dataset: SparkDataset, name: str) -> ShardReference:
        key = id(dataset.frame), dataset.equal, dataset.split
        number = self._numbers.setdefault(key, len(self.datasets))
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


def _parameter_names(function: Any, count: int) -> list[str]:
    """Return the names of parameters for so many positional arguments; else their numbers."""
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # a script, or a function written in C
        for each in inspect.signature(function).parameters.values():
            if each.kind is each.VAR_POSITIONAL:
                names += [f"{each.name}[{at}]" for at in range(count - len(names))]
            elif each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
                names.append(each.name)
    return [*names, *(f"argument {at}" for at in range(len(names), count))][:count]


def _differ(new: Any, old: Any) -> bool:
    return any(one is not other for one, other in zip(new, old, strict=True))
