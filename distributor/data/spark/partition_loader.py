"""The data loader of PySpark's distributor, over this rank's part of a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


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
    from distributor.data.spark.partition_batches import partition_loader

    return partition_loader(num_samples, batch_size, num_workers, prefetch_factor)
