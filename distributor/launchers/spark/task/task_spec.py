"""What the driver passes to every task of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributor.node.process.specs import NodeShare
from distributor.serialization.program import Program

if TYPE_CHECKING:
    from distributor.data.chunk_file import DatasetSpec


@dataclass(frozen=True, eq=False)
class ProgramFile:
    """A program that is too large for the task, and is in a file that Spark has sent.

    Parameters
    ----------
    name : str
        The file's name among Spark's files.
    dropped : tuple of str
        The names of such files that no run needs any more.
    """

    name: str
    dropped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What the driver passes to every task of a run, pickled with the task.

    Parameters
    ----------
    share : NodeShare
        What all nodes have; each task fills in the rest.
    program : Program or ProgramFile
        What each rank runs, or the file that contains it.
    use_gpu : bool
        Whether the ranks use the GPUs that Spark assigns to their task.
    driver_gpus : tuple of str
        In ``local[n]``: the driver's GPUs, one for each rank.
    gpu_type : str or None
        The required type of GPU.
    hub : tuple of str and int
        The address and port of the driver's hub.
    secret : bytes
        The run's secret, with which nodes and the hub authenticate each other.
    log_dir : str or None
        Folder for the ranks' output if the hub cannot be reached.
    max_spark_result_bytes : int
        Bytes that Spark can carry from one task to the driver: values, and reports of nodes without
        a link.
    datasets : tuple of DatasetSpec
        The datasets, whose rows Spark passes to the tasks.
    modules : str or None
        The name of the archive with the user's modules that Spark ships.
    environment : str, tuple of str or None
        What the ranks run in: the name of the folder that Spark ships, requirements, or None for
        the executors' own interpreter.
    cache_dir : str or None
        The cache of environments on a node whose own environment variables name none.
    check_memory : bool
        Whether nodes compare the memory that ranks need with the memory that they have.
    """

    share: NodeShare
    program: Program | ProgramFile
    use_gpu: bool
    driver_gpus: tuple[str, ...]
    gpu_type: str | None
    hub: tuple[str, int]
    secret: bytes = field(repr=False)
    log_dir: str | None
    max_spark_result_bytes: int
    datasets: tuple[DatasetSpec, ...]
    modules: str | None
    environment: str | tuple[str, ...] | None
    cache_dir: str | None
    check_memory: bool


@dataclass(frozen=True)
class MemberSpec:
    """What the driver passes to every task that holds a slot for a run, pickled with the task.

    Parameters
    ----------
    hub : tuple of str and int
        The address and port of the driver's hub for these tasks.
    secret : bytes
        With which the tasks and that hub authenticate each other.
    job : int
        Which of the run's jobs this is.
    """

    hub: tuple[str, int]
    secret: bytes = field(repr=False)
    job: int
