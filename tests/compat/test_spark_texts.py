"""Canaries for the texts of Spark's errors that `distributor._compat.pyspark` describes."""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

import pytest
from conftest import needs_java
from support.canary import relies_on

from distributor._compat import pyspark as spark_texts
from distributor._compat.pyspark import python_executable

pytestmark = [pytest.mark.repository, pytest.mark.spark, needs_java]


def found_in(text: str, pattern: str) -> str:
    """Return the first group that a pattern of a text has, as an error's translation does."""
    found = re.search(pattern, text, re.DOTALL)
    assert found, f"{pattern!r} does not match:\n{text[-4000:]}"
    return found[1] if found.re.groups else found[0]


def one_row(spark: Any) -> Any:
    """Return a frame of one partition: each further one would start a Python worker."""
    return spark.range(0, 1, numPartitions=1)


def error_of_task(spark: Any, body: str, barrier: bool = True) -> str:
    """Return the text of the error of a job whose task runs these lines."""
    lines = "".join(f"\n    {line}" for line in [*body.splitlines(), "yield from batches"])
    names: dict[str, Any] = {"__name__": "__main__"}  # so that it is pickled by value
    exec(compile(f"def task(batches):{lines}", "launchers/spark/task/task.py", "exec"), names)
    with python_executable(spark.sparkContext, sys.executable):
        frame = one_row(spark).mapInArrow(names["task"], "id long", barrier=barrier)
    with pytest.raises(Exception) as error:  # noqa: PT011
        frame.collect()
    return str(error.value)


ERROR = r"spark/task/task\.py.*\n(\w[\w.]*: .*?)" + spark_texts.END_OF_ERROR


@pytest.mark.parametrize(
    ("name", "body", "barrier", "pattern", "expected"),
    [
        ("END_OF_ERROR", "raise ValueError('this is why')", True, ERROR, "ValueError: this is why"),
        ("NO_MODULE", "import no_such_pkg.part", True, spark_texts.NO_MODULE, "no_such_pkg"),
        ("LOST_TASK", "import os\nos._exit(3)", False, spark_texts.LOST_TASK, None),
        ("CRASHED_WORKER", "import os\nos._exit(3)", True, spark_texts.CRASHED_WORKER, None),
    ],
)
def test_the_error_of_a_task(
    spark: Any, name: str, body: str, barrier: bool, pattern: str, expected: str | None
) -> None:
    text = error_of_task(spark, body, barrier)
    with relies_on("pyspark", "the text of a task's error", f"spark_texts.{name}"):
        assert found_in(text, pattern) == expected or expected is None


def test_an_interpreter_that_does_not_exist(spark: Any) -> None:
    with python_executable(spark.sparkContext, "/no/such/python"):
        frame = one_row(spark).mapInArrow(lambda batches: batches, "id long")
    with pytest.raises(Exception) as error:  # noqa: PT011
        frame.collect()
    with relies_on("pyspark", "the text of a missing program", "spark_texts.NO_INTERPRETER"):
        assert found_in(str(error.value), spark_texts.NO_INTERPRETER) == "/no/such/python"


def test_a_worker_with_another_python() -> None:
    from pyspark.errors import PySparkRuntimeError

    versions = {"worker_version": "3.9", "driver_version": "3.12"}
    try:
        error = PySparkRuntimeError(
            errorClass="PYTHON_VERSION_MISMATCH", messageParameters=versions
        )
    except TypeError:  # PySpark 3.5
        error = PySparkRuntimeError(
            error_class="PYTHON_VERSION_MISMATCH", message_parameters=versions
        )
    with relies_on("pyspark", "the text of a version mismatch", "spark_texts.OTHER_PYTHON"):
        found = re.search(spark_texts.OTHER_PYTHON, str(error))
        assert found is not None, error
        assert found.groups() == ("3.9", "3.12")


def test_a_package_that_a_worker_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql.pandas.utils import require_minimum_pandas_version

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError) as error:
        require_minimum_pandas_version()
    text = "".join(traceback.format_exception(error.value))
    with relies_on("pyspark", "the text of a missing package", "spark_texts.NO_PACKAGE"):
        assert found_in(text, spark_texts.NO_PACKAGE) == "Pandas"


def test_errors_of_the_jvm(spark: Any) -> None:
    jvm = spark.sparkContext._jvm
    with relies_on("pyspark", "the text of a lack of slots", "spark_texts.TOO_FEW_SLOTS"):
        error = jvm.org.apache.spark.scheduler.BarrierJobSlotsNumberCheckFailed(5, 4)
        assert found_in(error.getMessage(), spark_texts.TOO_FEW_SLOTS)
    with relies_on("pyspark", "the text of a lost executor", "spark_texts.LOST_EXECUTOR"):
        reason = jvm.scala.Option.apply("it was killed")
        error = jvm.org.apache.spark.ExecutorLostFailure("1", True, reason)
        assert "it was killed" in found_in(error.toErrorString(), spark_texts.LOST_EXECUTOR)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_a_full_disk(spark: Any) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011
        spark.sparkContext._jvm.java.io.FileOutputStream("/dev/full").write(1)
    with relies_on("pyspark", "the text of a full disk", "spark_texts.FULL_DISK"):
        assert found_in(str(error.value), spark_texts.FULL_DISK)
