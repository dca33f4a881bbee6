"""`distributor.doctor`: looks for what keeps a run from working, before one is started.

The checks of one machine and of a cluster are here, and the report that shows them. What a run
reports about its own failure is not.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distributor.core.cell_errors import ends_at_caller
from distributor.core.files import absolute
from distributor.settings import NOT_GIVEN

if TYPE_CHECKING:
    from distributor.diagnosis.report import Report


@ends_at_caller
def doctor(
    num_processes: int | None = None,
    local_mode: bool = True,
    gpus: int = 0,
    *,
    storage_path: str | os.PathLike[str] | None = None,
    hub_address: str | None = None,
    hub_port: int = NOT_GIVEN,
    rank_ports: str | None = NOT_GIVEN,
) -> Report:
    """Look for what would keep a run from working: versions, GPUs, network, memory, storage.

    It takes some seconds, and starts a run that trains nothing: its ranks examine their machines
    and the network between them, and reduce a tensor. Nothing is left behind.

    Parameters
    ----------
    num_processes : int, optional
        The number of ranks that a run would have. By default one for each executor, or two on this
        machine.
    local_mode : bool
        True to examine this machine only, False to examine the executors of the active Spark
        session too.
    gpus : int
        The number of GPUs that a run would have, one for each rank; 0 for ranks on CPUs.
    storage_path : str or path, optional
        A folder or address that all hosts share, such as ``/mnt/shared`` or ``s3://bucket/runs``.
        By default no storage is checked.
    hub_address : str, optional
        As for `TorchDistributor`: the address of the driver that executors connect to.
    hub_port : int, optional
        As for `TorchDistributor`: the driver's port.
    rank_ports : str, optional
        As for `TorchDistributor`: the ports for rank 0's store, such as "29500-29599".

    Returns
    -------
    Report
        The checks. It is a table in a notebook and when it is printed; ``report.failures`` has the
        checks that failed, and ``report.to_json()`` is for programs.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    RuntimeError
        If `local_mode` is False and there is no active Spark session.

    Examples
    --------
    >>> report = distributor.doctor(num_processes=8, local_mode=False, storage_path="/mnt/shared")
    >>> print(report)
    >>> assert not report.failures
    """
    from contextlib import nullcontext

    from distributor.diagnosis.examination import examine_cluster, examine_here
    from distributor.diagnosis.report import Wanted
    from distributor.settings import check_bool
    from distributor.spark.session import Session

    check_bool("local_mode", local_mode)
    path = None if storage_path is None else absolute(storage_path, "storage_path")
    wanted = Wanted(num_processes, gpus, path, hub_address, hub_port, rank_ports)
    if local_mode:
        return examine_here(wanted)
    session = Session.require_active()
    return examine_cluster(wanted, lambda: nullcontext(session.spark))
