"""`TorchDistributor`: PySpark's class, with return values, errors and clean-up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from distributor.control.attempts import execute
from distributor.control.future import RunFuture, start_run
from distributor.core.spelling import Spelling, checks_keywords
from distributor.data.dataframes import DatasetFinder, from_spark, get_spark_partition_data_loader
from distributor.prepared_run import PlannedSettings, prepare_run
from distributor.settings.fields import documented
from distributor.spark.session import Session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "TorchDistributor",
    "_get_spark_partition_data_loader",
    "get_spark_partition_data_loader",
]

P = ParamSpec("P")
R = TypeVar("R")
_get_spark_partition_data_loader = get_spark_partition_data_loader
"""The name that PySpark's module has for it."""


@documented()
@checks_keywords
@dataclass(frozen=True, repr=False)
class TorchDistributor(PlannedSettings):
    """Runs a PyTorch function or script on several ranks, on this machine or on a Spark cluster.

    A drop-in replacement for `pyspark.ml.torch.distributor.TorchDistributor
    <https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.torch.distributor.TorchDistributor.html>`_.
    Ranks find the environment variables of `torchrun
    <https://docs.pytorch.org/docs/stable/elastic/run.html>`_. All settings are checked on
    construction: missing GPUs or a Spark configuration that cannot work raise an error before
    anything is launched.

    Parameters
    ----------
    {settings}

    Raises
    ------
    TypeError, ValueError, OSError
        If a setting is invalid. The message names the setting and its value.
    RuntimeError
        If there are no GPUs or too few, or if distributed mode finds no active Spark session.

    Attributes
    ----------
    num_tasks : int
        The number of Spark tasks; in local mode, as in PySpark's class, the number of ranks.
    input_params : dict
        ``num_processes``, ``local_mode``, ``use_gpu`` and ``num_tasks``, in a new dict each time.
    logger : logging.Logger
        Receives what PySpark's class logs; other messages go to the logger "distributor".
    spark : SparkSession or None
        The active Spark session.

    Examples
    --------
    >>> def train(learning_rate):
    ...     import torch.distributed as dist
    ...     dist.init_process_group("gloo")
    ...     return dist.get_world_size()
    >>> TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(train, 1e-3)
    2
    """

    spelling = Spelling(logger="TorchDistributor", hides_gpus=False)

    @property
    def logger(self) -> logging.Logger:
        """The logger for what PySpark's class logs."""
        return logging.getLogger(self.spelling.logger)

    @property
    def spark(self) -> SparkSession | None:
        """The active Spark session."""
        session = Session.active()
        return None if session is None else session.spark

    @overload
    def run(self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def run(self, train_object: str | os.PathLike[str], *args: object) -> None: ...

    def run(self, train_object: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function or a script on every rank, and return rank 0's value.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Positional arguments of the callable, or command-line arguments of the script.
        **kwargs
            Keyword arguments of the callable. A script takes none.

        Returns
        -------
        object
            Rank 0's value; None for a script.

        Raises
        ------
        Exception
            The failed rank's own exception, with its type and arguments. Its cause is the remote
            traceback, and its ``rank_failures`` maps each failed rank to its failure, the cause
            first.
        WorkerDied
            If a rank was killed, crashed or exited.
        RemoteError
            If the rank's exception cannot be rebuilt in this process.
        StartTimeout, RunTimeout, RunStalled
            If ``start_timeout``, ``timeout`` or ``stall_timeout`` has passed.
        NodeLost
            If a node stopped answering, or its executor died.
        ExecutorNotReady
            If an executor lacks something that ranks need, such as torch.
        UnpicklableError
            If the callable, an argument or a value cannot be pickled.
        ValueTooLarge
            If a value cannot be sent to the driver; `load_value` reads it.
        TypeError, ValueError, OSError
            If `train_object` is not a callable or a Python script, a script has keyword arguments,
            or ``hub_address`` cannot be bound.
        RuntimeError
            If Spark's configuration requires encryption, or there are too few GPUs by now.
        DistributorError
            The base class of the errors of this package above, and raised itself if a returned
            value cannot be unpickled here.

        Examples
        --------
        >>> def square(x):
        ...     return x**2
        >>> TorchDistributor(2, use_gpu=False).run(square, 3)
        9
        >>> TorchDistributor(2, use_gpu=False).run("train.py", "--epochs=3")  # doctest: +SKIP
        """
        return execute(prepare_run(self, False, train_object, args, kwargs))[0]

    @overload
    def run_all(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...

    @overload
    def run_all(self, train_object: str | os.PathLike[str], *args: object) -> list[None]: ...

    def run_all(self, train_object: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function or a script on every rank, and return the values of all ranks.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Positional arguments of the callable, or command-line arguments of the script.
        **kwargs
            Keyword arguments of the callable. A script takes none.

        Returns
        -------
        list
            Every rank's value, in rank order.

        Raises
        ------
        Exception
            As `run` does.

        Examples
        --------
        >>> TorchDistributor(2, use_gpu=False).run_all(runtime.get_global_rank)
        [0, 1]
        """
        return execute(prepare_run(self, True, train_object, args, kwargs))

    @overload
    def submit(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> RunFuture[R]: ...

    @overload
    def submit(self, train_object: str | os.PathLike[str], *args: object) -> RunFuture[None]: ...

    def submit(self, train_object: Any, *args: Any, **kwargs: Any) -> RunFuture[Any]:
        """Start a run in the background. Several runs may be active at the same time.

        A script that reaches its end waits for its active runs, and then shows the errors that it
        has not read. Ctrl-C ends the wait and the runs.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Positional arguments of the callable, or command-line arguments of the script.
        **kwargs
            Keyword arguments of the callable. A script takes none.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` of what `run` returns or raises. Its ``cancel()`` ends
            the run.

        Raises
        ------
        TypeError, ValueError, OSError, RuntimeError, UnpicklableError
            If the run cannot start, as `run` raises them. The future raises errors of the run.

        Examples
        --------
        >>> future = TorchDistributor(2, use_gpu=False).submit(square, 3)  # doctest: +SKIP
        >>> future.result()  # doctest: +SKIP
        9
        """
        return self._submit(lambda values: values[0], False, train_object, args, kwargs)

    @overload
    def submit_all(
        self, train_object: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> RunFuture[list[R]]: ...

    @overload
    def submit_all(
        self, train_object: str | os.PathLike[str], *args: object
    ) -> RunFuture[list[None]]: ...

    def submit_all(self, train_object: Any, *args: Any, **kwargs: Any) -> RunFuture[list[Any]]:
        """Start a run in the background, as `submit` does, for the values of all ranks.

        Parameters
        ----------
        train_object : callable or path
            What each rank runs: any callable, or a Python script.
        *args
            Positional arguments of the callable, or command-line arguments of the script.
        **kwargs
            Keyword arguments of the callable. A script takes none.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` of what `run_all` returns or raises. Its ``cancel()``
            ends the run.

        Raises
        ------
        TypeError, ValueError, OSError, RuntimeError, UnpicklableError
            If the run cannot start, as `run` raises them. The future raises errors of the run.

        Examples
        --------
        >>> ranks = TorchDistributor(2, use_gpu=False)  # doctest: +SKIP
        >>> ranks.submit_all(runtime.get_global_rank).result()  # doctest: +SKIP
        [0, 1]
        """
        return self._submit(lambda values: values, True, train_object, args, kwargs)

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
        return execute(prepare_run(self, False, train_function, args, kwargs, finder))[0]  # type: ignore[no-any-return]

    _train_on_dataframe = train_on_dataframe

    def _submit(
        self,
        pick: Callable[[list[Any]], Any],
        keep_all: bool,
        train_object: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RunFuture[Any]:
        run = prepare_run(self, keep_all, train_object, args, kwargs)
        return start_run(lambda: pick(execute(run)), run)
