"""The datasets of a trainer whose function runs in the trainer's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distributor.data.dataframes import DatasetFinder, ShardReference
from distributor.launch.call_site import CallSite
from distributor.launch.cancellation import Cancellation
from distributor.launch.job import new_run_id
from distributor.rank.context import worker_context

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard


@contextlib.contextmanager
def shards_in_process(datasets: Mapping[str, Any]) -> Iterator[Mapping[str, DatasetShard]]:
    """Open datasets in this process, whose rows it keeps for the duration of the context.

    Parameters
    ----------
    datasets : mapping of str to SparkDataset or DatasetShard
        The datasets by name.
    """
    finder = DatasetFinder()
    (found,), _ = finder.replace_in((dict(datasets),), {})
    if not finder.datasets:
        yield datasets
        return
    from distributor.data.chunk_file import open_shard
    from distributor.launch.spark.datasets.collection import Datasets

    opened = Datasets(finder.datasets)
    call_site = CallSite.of_caller("TorchTrainer")
    context = worker_context()
    with opened.opened(new_run_id(), call_site, None, Cancellation()):
        opened.check(1)
        context.data = opened.file().fileno()
        try:
            yield {
                name: open_shard(value.number) if isinstance(value, ShardReference) else value
                for name, value in found.items()
            }
        finally:
            context.data = None
