"""The interface of objects that follow a run on the driver."""

from __future__ import annotations

from distributor.rank.messages import Progress, Reported
from distributor.wire.messages import Stream


class Listener:
    """Follows a run on the driver: subclass it, and override the methods of interest.

    All methods are called in the order of events on a thread of the run's own, so an MLflow run
    that is active on the thread of the caller is not active in them. By default each does nothing.
    If a method raises, the run ends with that exception, and no method is called after it. The
    ranks' events of one attempt come between its `begins` and the next one, or the end of the run.

    A run never waits for a method while its ranks are at work. If methods are too slow, `printed`,
    `progressed` and `used` are not called for each event; a warning says so. At its end a run waits
    for the calls that are left, at most 60 s for each one.

    See Also
    --------
    TorchDistributor : takes listeners as its setting ``listeners``.

    Examples
    --------
    >>> class Losses(Listener):
    ...     def __init__(self):
    ...         self.losses = []
    ...     def progressed(self, rank, progress):
    ...         self.losses.append((rank, progress.done, progress.metrics["loss"]))
    >>> TorchDistributor(2, listeners=[Losses()]).run(train)  # doctest: +SKIP
    """

    def begins(self, attempt: int, ranks: int) -> None:
        """Handle the start of an attempt.

        Parameters
        ----------
        attempt : int
            The number of the attempt, from 0.
        ranks : int
            The number of its ranks.
        """

    def printed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Handle a rank's output.

        Parameters
        ----------
        rank : int
            The rank.
        stream : "stdout" or "stderr"
            The stream that it wrote to.
        data : bytes
            The output, cut at any byte.
        """

    def progressed(self, rank: int, progress: Progress) -> None:
        """Handle a rank's call of ``distributor.runtime.progress``.

        Parameters
        ----------
        rank : int
            The rank.
        progress : Progress
            The progress and metrics that it reported.
        """

    def used(self, usage: Progress) -> None:
        """Handle a node's use of its processors, memory, network and GPUs.

        Parameters
        ----------
        usage : Progress
            Its metrics.
        """

    def reported(self, report: Reported) -> None:
        """Handle a report that all ranks made with ``distributor.train.report``.

        Parameters
        ----------
        report : Reported
            The metrics of all ranks, and the checkpoint.
        """

    def failed(self, attempt: int, error: Exception) -> None:
        """Handle the failure of an attempt. It is not called if the run is cancelled.

        Parameters
        ----------
        attempt : int
            The number of the attempt, from 0.
        error : Exception
            The error; ``error.rank_failures`` maps each failed rank to its failure.
        """
