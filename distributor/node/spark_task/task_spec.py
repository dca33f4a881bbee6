"""What the driver passes to every task of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributor.serialization.program import Program

if TYPE_CHECKING:
    from distributor.data.chunk_file import DatasetSpec


@dataclass(frozen=True)
class ProgramFile:
    """A program that is too large for the task, and is kept in a file on each node.

    Parameters
    ----------
    name : str
        The file's name among Spark's files; the same for the same program.
    size : int
        Its size in bytes.
    """

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What the driver passes to every task of a run, pickled with the task.

    Parameters
    ----------
    run_id, attempt : str, int
        The run, and the number of its attempt, counted from 0.
    program : Program or ProgramFile
        What each rank runs, or the file that contains it.
    program_name : str
        The function's or script's name.
    ranks_per_node : int
        Number of ranks that each task starts.
    keep_all : bool
        Whether every rank's value is wanted, or rank 0's alone.
    env : dict of str to str
        The user's environment variables for the ranks.
    use_gpu : bool
        Whether the ranks use the GPUs that Spark assigns to their task.
    driver_gpus : tuple of str
        In ``local[n]``: the driver's GPUs, one for each rank.
    hub : tuple of str and int
        The address and port of the driver's hub.
    secret : bytes
        The run's secret, with which nodes and the hub authenticate each other.
    log_dir : str or None
        Folder for the ranks' output if the hub cannot be reached.
    max_spark_result_bytes : int
        Bytes that Spark can carry from one task to the driver: values, and reports of nodes without
        a link.
    rendezvous_timeout : float
        Seconds to wait for the other nodes, and then for the ranks to start.
    timeout : float or None
        Seconds that the ranks may take once they have started. The driver enforces it, or the node
        itself if it has no link to the driver.
    activity_interval : float or None
        Seconds between two measurements of whether the ranks are idle; None for no measurement.
    warm, preload : bool, tuple of str
        Whether ranks are forked from a warm process, and what it imports in addition to torch.
    datasets : tuple of DatasetSpec
        The datasets, whose rows Spark passes to the tasks.
    gpu_type : str or None
        The required type of GPU.
    modules : str or None
        The name of the archive with the user's modules that Spark ships.
    environment : str, tuple of str or None
        What the ranks run in: the name of the folder that Spark ships, requirements, or None for
        the executors' own interpreter.
    rank_ports : range or None
        The ports that rank 0's store may use; None for any.
    cache_dir : str or None
        The cache of environments on a node whose own environment variables name none.
    check_memory : bool
        Whether nodes compare the memory that ranks need with the memory that they have.
    """

    run_id: str
    attempt: int
    program: Program | ProgramFile
    program_name: str
    ranks_per_node: int
    keep_all: bool
    env: dict[str, str] = field(repr=False)
    use_gpu: bool
    driver_gpus: tuple[str, ...]
    hub: tuple[str, int]
    secret: bytes = field(repr=False)
    log_dir: str | None
    max_spark_result_bytes: int
    rendezvous_timeout: float
    timeout: float | None
    activity_interval: float | None
    warm: bool
    preload: tuple[str, ...]
    datasets: tuple[DatasetSpec, ...]
    gpu_type: str | None
    modules: str | None
    environment: str | tuple[str, ...] | None
    rank_ports: range | None
    cache_dir: str | None
    check_memory: bool
