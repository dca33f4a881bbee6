"""What the driver passes to every task of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from distributor.serialization.program import Program


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What the driver tells every task of a run, pickled with the task.

    Parameters
    ----------
    run_id, attempt : str, int
        The run.
    program : Program or str
        What each rank runs, or the name of the file that Spark has brought with it.
    program_name : str
        The function's or script's name.
    ranks_per_node : int
        Ranks that each task starts.
    keep_all : bool
        Whether every rank's value is wanted, or rank 0's alone.
    env : dict of str to str
        The user's variables for the ranks.
    use_gpu : bool
        Whether the ranks have the GPUs that Spark assigned to their task.
    driver_gpus : tuple of str
        In ``local[n]``: the driver's GPUs, one for each rank.
    hub : tuple of str and int
        Where the driver listens.
    secret : bytes
        What proves a node to the hub, and the hub to a node.
    log_dir : str or None
        Folder for the ranks' output where the hub cannot be reached.
    most_through_spark : int
        Bytes of values that Spark can carry from one task to the driver.
    meet_timeout : float
        Seconds to wait for the other nodes, and then for the ranks to start.
    timeout : float or None
        Seconds that the ranks may take once they have started. The driver enforces it; a node
        without a link to the driver has to do so itself.
    warm, preload : bool, tuple of str
        Whether ranks are forked from a warm process, and what it imports beside torch.
    gpu_type : str or None
        What the GPUs have to be.
    modules : str or None
        The name of the archive with the user's modules that Spark has brought.
    environment : str, tuple of str or None
        What the ranks run in: the name of the folder that Spark has brought, or requirements.
    rank_ports : range or None
        The ports that rank 0's store may have.
    cache_dir : str or None
        Where environments are kept on a node whose own environment names no folder.
    check_memory : bool
        Whether nodes are to compare what ranks need of memory with what they have.
    """

    run_id: str
    attempt: int
    program: Program | str
    program_name: str
    ranks_per_node: int
    keep_all: bool
    env: dict[str, str] = field(repr=False)
    use_gpu: bool
    driver_gpus: tuple[str, ...]
    hub: tuple[str, int]
    secret: bytes = field(repr=False)
    log_dir: str | None
    most_through_spark: int
    meet_timeout: float
    timeout: float | None
    warm: bool
    preload: tuple[str, ...]
    gpu_type: str | None
    modules: str | None
    environment: str | tuple[str, ...] | None
    rank_ports: range | None
    cache_dir: str | None
    check_memory: bool
