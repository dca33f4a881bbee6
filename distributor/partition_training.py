"""Training on a DataFrame in the spelling of PySpark's `TorchDistributor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from distributor.data.dataframes import DatasetFinder, from_spark
from distributor.prepared_run import PlannedSettings, prepare_run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

R = TypeVar("R")


@dataclass(frozen=True)
class PartitionTraining(PlannedSettings):
    """Settings with the method of PySpark's class that trains on a DataFrame."""

    def train_on_dataframe(
        self,
        train_function: Callable[..., R],
        spark_dataframe: DataFrame,
        *args: Any,
        **kwargs: Any,
    ) -> R:
        """Run a function whose ranks read their parts of a DataFrame through a data loader.

        The function calls `get_spark_partition_data_loader`. To pass DataFrames as arguments, use
        `run`.

        Follows ``TorchDistributor._train_on_dataframe`` of PySpark, but with any number of
        partitions.

        Parameters
        ----------
        train_function : callable
            What each rank runs.
        spark_dataframe : pyspark.sql.DataFrame
            The DataFrame. Its rows are divided among the ranks, whose numbers of rows differ by at
            most one.
        *args, **kwargs
            Arguments of the function.

        Returns
        -------
        object
            Rank 0's value.

        Raises
        ------
        ValueError
            If ``local_mode`` is True, as in PySpark's class, or there are fewer rows than ranks.
        TypeError
            If `spark_dataframe` is not a DataFrame.
        Exception
            As `run` raises them.

        Examples
        --------
        >>> def train(num_samples):
        ...     loader = get_spark_partition_data_loader(num_samples, batch_size=32)
        ...     for features, labels in loader:
        ...         ...
        >>> ranks = TorchDistributor(2, local_mode=False, use_gpu=False)  # doctest: +SKIP
        >>> ranks.train_on_dataframe(train, df, 1000)  # doctest: +SKIP
        """
        if self.local_mode:
            raise ValueError(
                "TorchDistributor.train_on_dataframe requires setting "
                "TorchDistributor.local_mode to False. (run takes DataFrames in local mode too.)"
            )
        finder = DatasetFinder()
        finder.add(from_spark(spark_dataframe, equal=False), "spark_dataframe")
        return prepare_run(self, False, train_function, args, kwargs, finder).run()[0]  # type: ignore[no-any-return]

    _train_on_dataframe = train_on_dataframe
