"""What Spark's own errors mean for a user of this package."""

from __future__ import annotations

import re
from collections.abc import Callable

from distributor.errors import DistributorError, ExecutorNotReady

SET_PYTHON = (
    "Set PYSPARK_PYTHON (spark.pyspark.python for spark-submit) to a Python that has torch and "
    "pyarrow and is of the driver's version, at the same path on every node, before the Spark "
    "session is made."
)


def explain(error: BaseException, num_tasks: int) -> DistributorError:
    """Turn the exception of a Spark job whose ranks told nothing into one that helps.

    Parameters
    ----------
    error : BaseException
        What ``collect`` raised.
    num_tasks : int
        How many tasks the job had.

    Returns
    -------
    DistributorError
    """
    text = str(error)
    for pattern, make in _MEANINGS:
        if found := re.search(pattern, text, re.DOTALL):
            return make(found, _where(text))
    return DistributorError(
        f"Spark ended the job of {num_tasks} tasks before any rank reported a failure"
        f"{_where(text)}:\n{text[:4000]}"
    )


def _where(text: str) -> str:
    """Name the host of the task that Spark's message tells of."""
    found = re.search(r"Lost task \S+ in stage \S+ \(TID \d+\) \(([^\s)]+)", text)
    return f" on {found.group(1)}" if found else ""


Meaning = Callable[["re.Match[str]", str], DistributorError]


def _not_ready(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(found.group(1).strip())


def _other_python(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(
        f"The Python worker{where} runs Python {found.group(1)}, the driver {found.group(2)}. "
        f"{SET_PYTHON}"
    )


def _no_module(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(
        f"The Python worker{where} has no {found.group(1)}, which this package needs there. "
        f"{SET_PYTHON}"
    )


def _no_interpreter(found: re.Match[str], where: str) -> DistributorError:
    return ExecutorNotReady(f"There is no Python at '{found.group(1)}'{where}. {SET_PYTHON}")


def _python_error(found: re.Match[str], where: str) -> DistributorError:
    return DistributorError(f"A task failed{where} before its ranks ran: {found.group(1).strip()}")


_MEANINGS: list[tuple[str, Meaning]] = [
    (r"ExecutorNotReady: (.*?)(?:\n|$)", _not_ready),
    (r"worker has different version:? \(?(.*?)\)? than that in driver:? (\S+?),", _other_python),
    (r"No module named '?([\w.]+)", _no_module),
    (r"(?:PACKAGE_NOT_INSTALLED\] |ImportError: )(\w+) >= \S+ must be installed", _no_module),
    (r'Cannot run program "([^"]+)"', _no_interpreter),
    (r"barrier_task\.py.*\n(\w[\w.]*: .*?)\n(?:\s*SQLSTATE|\s*\n|\s+at )", _python_error),
]
