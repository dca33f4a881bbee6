"""The file with the program that a node's ranks run.

A small program comes with the task. A large one is kept in a file among Spark's files, which one
node of each such folder receives from the driver or from another node, once per session.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from distributor.core.addresses import host_name
from distributor.core.files import atomic_path, for_this_user
from distributor.core.resources import format_bytes
from distributor.errors import ExecutorNotReady
from distributor.launchers.spark.task.shipped_files import program_on_this_node
from distributor.launchers.spark.task.task_spec import ProgramFile, TaskSpec
from distributor.node.node import Node
from distributor.serialization.program import in_file
from distributor.spark.executor_modules import spark_files_folder
from distributor.wire.messages import ProgramRelay, ProgramStored, ProgramWanted
from distributor.wire.transfer import (
    ArrivingBlock,
    BlockServer,
    ProgramNotReceived,
    block_secret,
    digest,
    receive,
)

KEPT = 4
"""How many large programs a folder keeps: those that were used last."""
PREFIX = "distributor-program-"
"""Followed by the program's digest, by which a node recognizes that it was not changed."""


@contextlib.contextmanager
def program_file(spec: TaskSpec, node: Node) -> Iterator[BinaryIO]:
    """Return a file with the program; a large one is received first if this node lacks it."""
    if not isinstance(spec.program, ProgramFile):
        with in_file(program_on_this_node(spec.program)) as file:
            yield file
        return
    path = spark_files_folder() / spec.program.name
    with contextlib.ExitStack() as until_end:
        if not path.exists():
            until_end.enter_context(_received(path, spec, node))
        file = until_end.enter_context(path.open("rb"))
        os.utime(path)
        _remove_old(path)
        yield file


@contextlib.contextmanager
def _received(path: Path, spec: TaskSpec, node: Node) -> Iterator[None]:
    """Receive the file, or wait until another node has; pass it on until the context ends."""
    address = node.share.address
    folder = f"{address}:{path.parent}"
    source = node.find_program(ProgramWanted(folder))
    if source is None:
        raise ProgramNotReceived(
            f"The executor on {host_name()} has no link to the driver at {spec.hub[0]}:"
            f"{spec.hub[1]}, and has not received the program and its arguments."
        )
    if isinstance(source, ProgramStored):
        yield
        return
    _check_room(path.parent, _size(spec))
    with contextlib.ExitStack() as until_end:
        with atomic_path(path) as partial:
            file = until_end.enter_context(open(partial, "x+b", opener=for_this_user))
            pool = until_end.enter_context(ThreadPoolExecutor(1))
            block = until_end.enter_context(ArrivingBlock(file, _size(spec)))
            with contextlib.suppress(OSError):  # without a free port, this node passes nothing on
                server = until_end.enter_context(_serve(address, spec, block))
                node.send(ProgramRelay(address, server.port))
            found = pool.submit(digest, block, block.size)  # takes as long as a fast network
            _receive(block, source.address, spec, node.share.node_rank)
            if path.name != PREFIX + found.result():
                raise ProgramNotReceived(
                    f"The executor on {host_name()} has received the program and its arguments "
                    "changed: another thread of the driver has changed an array or a tensor "
                    "meanwhile, or the network between them is damaged or under attack."
                )
        node.send(ProgramStored(folder))
        yield


def _receive(
    block: ArrivingBlock, source: tuple[str, int] | None, spec: TaskSpec, node_rank: int
) -> None:
    """Receive a block from a node, or from the driver what a node could not send."""
    failure: OSError | None = None
    for address in (source, None):
        if block.arrived == block.size:
            return
        try:
            receive(
                address or spec.hub,
                block_secret(spec.secret),
                node_rank,
                block.arrived,
                lambda data: _append(block, data),
            )
        except OSError as error:
            failure = error
    if block.arrived < block.size:
        raise ProgramNotReceived(
            f"The executor on {host_name()} has received {format_bytes(block.arrived)} of the "
            f"{format_bytes(block.size)} of the program and its arguments from "
            f"{spec.hub[0]}:{spec.hub[1]} ({failure or 'the connection ended'})."
        )


def _append(block: ArrivingBlock, data: memoryview) -> None:
    if block.arrived + data.nbytes > block.size:
        raise ConnectionError("more than the program came")
    try:
        block.append(data)
    except OSError as error:
        raise _full_disk(spark_files_folder(), block.size) from error


def _check_room(folder: Path, size: int) -> None:
    if shutil.disk_usage(folder).free < size:
        raise _full_disk(folder, size)


def _full_disk(folder: Path, size: int) -> ExecutorNotReady:
    free = format_bytes(shutil.disk_usage(folder).free)
    return ExecutorNotReady(
        f"On {host_name()} the program and its arguments take {format_bytes(size)}, and there are "
        f"{free} free in {folder}. Free space there, set another folder (spark.local.dir), or let "
        "the ranks load the data themselves."
    )


def _serve(address: str, spec: TaskSpec, block: ArrivingBlock) -> BlockServer:
    """Serve a block at a port that ``rank_ports`` allows."""
    secret = block_secret(spec.secret)
    for port in spec.share.rank_ports or ():
        with contextlib.suppress(OSError):
            return BlockServer(address, secret, block, port=port)
    if spec.share.rank_ports:
        raise OSError("no port of rank_ports is free")
    return BlockServer(address, secret, block)


def _size(spec: TaskSpec) -> int:
    assert isinstance(spec.program, ProgramFile)
    return spec.program.size


def _remove_old(used: Path) -> None:
    """Remove the files that have not been used for the longest time, and what kills have left."""
    files = [each for each in used.parent.glob(f"{PREFIX}*") if each != used]
    for old in sorted(files, key=_last_use, reverse=True)[KEPT - 1 :]:
        old.unlink(missing_ok=True)  # ranks that have opened it keep it


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # removed by another task
