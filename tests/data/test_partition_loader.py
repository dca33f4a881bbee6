"""The data loader of PySpark's distributor, beside the original."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.ml.linalg import Vectors
from pyspark.ml.torch.distributor import TorchDistributor as PySparks

from distributor import TorchDistributor
from distributor._compat.pyspark import python_executable
from distributor.torch_distributor import (
    _get_spark_partition_data_loader,
    get_spark_partition_data_loader,
)

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("restored_loggers")]


def frame(spark: Any) -> Any:
    """Return a DataFrame of two partitions of three rows."""
    rows = [
        (i, i + 0.5, i, [float(i), 1.0], [i, i], Vectors.dense([i, 2.0]) if i % 2 else sparse(i))
        for i in range(6)
    ]
    names = ["id", "x", "small", "floats", "ints", "v"]
    made = spark.createDataFrame(rows, names).selectExpr(
        "id",
        "float(x) AS x",
        "smallint(small) AS small",
        "cast(floats AS array<float>) AS floats",
        "cast(ints AS array<int>) AS ints",
        "v",
    )
    return made.repartitionByRange(2, "id").sortWithinPartitions("id")


def sparse(value: int) -> Any:
    return Vectors.sparse(2, {1: float(value)})


def load(loader: Callable[..., Any], num_samples: int, num_workers: int) -> list[Any]:
    batches = loader(num_samples, batch_size=2, num_workers=num_workers)
    return [[(column.dtype, column.tolist()) for column in batch] for batch in batches]


def load_pysparks(num_samples: int, num_workers: int) -> list[Any]:
    from pyspark.ml.torch.distributor import _get_spark_partition_data_loader as loader

    return load(loader, num_samples, num_workers)


@pytest.mark.slow
def test_the_batches_are_pysparks(spark: Any) -> None:
    """Fewer rows than there are in a partition, and more, which are then repeated."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # PySpark's class sends no modules
    theirs = PySparks(2, local_mode=False, use_gpu=False)
    ours = TorchDistributor(2, local_mode=False, use_gpu=False)
    with python_executable(spark.sparkContext, sys.executable):
        expected = theirs._train_on_dataframe(lambda: load_pysparks(5, 0), frame(spark))
    found = ours._train_on_dataframe(
        lambda: load(_get_spark_partition_data_loader, 5, 0), frame(spark)
    )
    assert found == expected
    assert [len(batch[0][1]) for batch in found] == [2, 2, 1]


@pytest.mark.slow(ci=True)
def test_columns_have_any_name(spark: Any) -> None:
    """PySpark's own loader selects columns by name, and fails."""
    odd = frame(spark).toDF("a.b", "*", "v", "V", "a`b", "v.x")
    ours = TorchDistributor(2, local_mode=False, use_gpu=False)
    run = [
        ours.train_on_dataframe(lambda: load(get_spark_partition_data_loader, 3, 0), each)
        for each in (odd, frame(spark))
    ]
    assert run[0] == run[1]


def test_a_process_loads_the_rows(spark: Any) -> None:
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False)
    frame = spark.range(0, 6, 1, 4)
    assert ranks.train_on_dataframe(
        lambda loader: load(loader, 2, 1), frame, get_spark_partition_data_loader
    )


def test_local_mode_is_refused_as_in_pyspark(spark: Any) -> None:
    for kind in (PySparks, TorchDistributor):
        with pytest.raises(ValueError, match="local_mode to False"):
            kind(2, local_mode=True, use_gpu=False)._train_on_dataframe(print, spark.range(2))


@pytest.mark.parametrize(
    ("arguments", "columns", "kind", "message"),
    [
        ((0, 2), "id", ValueError, "num_samples must be an integer of at least 1, but is 0"),
        pytest.param(
            (2, 2, 2),
            "id",
            RuntimeError,
            "num_workers is 2, but .* at most one process",
            marks=pytest.mark.slow,
        ),
        ((2, 2), "id > 1 AS flag", ValueError, "does not support the type bool of column 'flag'"),
    ],
)
def test_errors_name_the_argument_or_the_column(
    spark: Any, arguments: Any, columns: str, kind: type[Exception], message: str
) -> None:
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False)
    with pytest.raises(kind, match=message):
        ranks.train_on_dataframe(
            get_spark_partition_data_loader, spark.range(4).selectExpr(columns), *arguments
        )


def test_outside_such_a_run_there_is_no_loader() -> None:
    with pytest.raises(RuntimeError, match="only available in the ranks of the run"):
        get_spark_partition_data_loader(2, 2)
