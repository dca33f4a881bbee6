"""The outcomes of an attempt: what arrived over the links, and what the Spark job returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distributor.errors import NodeLost
from distributor.launch.spark.error_translation import explain
from distributor.launch.spark.monitor.value_receiver import ValueReceiver
from distributor.node.spark_task.result_rows import REPORTS_PART, unpacked
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Failure, Outcome, Value
from distributor.wire.messages import Output
from distributor.wire.spark_error_payload import failures_in, timeout_in


class Outcomes:
    """The failures and values of an attempt's ranks.

    Parameters
    ----------
    num_tasks : int
        How many tasks the Spark job has.
    num_ranks : int
        How many ranks the attempt has.
    secret : bytes
        The run's secret, with which failures in Spark's errors are sealed.

    Attributes
    ----------
    receiver : ValueReceiver
        Receives values over the links.
    """

    def __init__(self, num_tasks: int, num_ranks: int, secret: bytes) -> None:
        self._num_tasks = num_tasks
        self._num_ranks = num_ranks
        self._secret = secret
        self._failures: list[Failure] = []
        self.receiver = ValueReceiver()

    def add_failure(self, failure: Failure) -> None:
        """Add a failure that a node reported."""
        self._failures.append(failure)

    @property
    def has_cause(self) -> bool:
        """Whether a failure can be the cause of the others."""
        return not all(failure.collateral for failure in self._failures)

    @property
    def all_failed(self) -> bool:
        """Whether every rank has failed, so that no further failure can follow."""
        return len({failure.origin.rank for failure in self._failures}) == self._num_ranks

    def after_error(self, error: BaseException, first_lost: str) -> list[Outcome]:
        """Return the outcomes of a job that Spark ended with an error.

        Parameters
        ----------
        error : BaseException
            What Spark raised.
        first_lost : str
            The ranks and the host of the first node whose link was lost; empty if there is none.

        Raises
        ------
        RunTimeout, StartTimeout
            If a node failed because a deadline had passed.
        DistributorError
            If no rank reported a failure that can be the cause.
        """
        reported = {failure.origin.rank for failure in self._failures}
        sealed = failures_in(str(error), self._secret)
        failures = [*self._failures, *(f for f in sealed if f.origin.rank not in reported)]
        if all(failure.collateral for failure in failures):
            self._raise_cause(error, failures, first_lost)
        return [*failures, *self.receiver.values.values()]

    def _raise_cause(self, error: BaseException, failures: list[Failure], first_lost: str) -> None:
        """Raise what Spark knows of a run whose ranks reported nothing but lost connections."""
        if timed_out := timeout_in(str(error), self._secret):
            raise timed_out from error
        explained = explain(error, self._num_tasks, first_lost)
        if not failures or isinstance(explained, NodeLost):
            raise explained from error

    def after_success(self, rows: list[Any]) -> list[Outcome]:
        """Return the outcomes of a job that returned these rows."""
        values = _values_in(rows) | self.receiver.values
        return [*self._failures, *values.values()]

    def stacks_in(self, ending: list[Any] | BaseException | None) -> dict[int, str]:
        """Return the stacks, by rank, of nodes that failed at a deadline by themselves."""
        timed_out = timeout_in(str(ending), self._secret)
        return timed_out.stacks if timed_out else {}


def late_output_in(rows: list[Any]) -> Iterator[Output]:
    """Yield what ranks reported that no link could carry."""
    for row in rows:
        if row.part == REPORTS_PART:
            yield from unpacked(row.data)


def _values_in(rows: list[Any]) -> dict[int, Value]:
    """Return the values that came as rows, by rank, each put together from its parts."""
    values: dict[int, Value] = {}
    parts = (row for row in rows if row.part != REPORTS_PART)
    for row in sorted(parts, key=lambda row: (row.rank, row.part)):
        if row.rank not in values:
            values[row.rank] = Value(row.rank, anonymous_file())
        values[row.rank].file.write(row.data)
    return values
