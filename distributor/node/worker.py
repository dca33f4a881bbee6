"""One rank: load the program, run it, record the outcome, leave."""

from __future__ import annotations

import faulthandler
import os
import pickle
import pkgutil
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributor.node import notices, reached
from distributor.node.finishing import finish
from distributor.node.group_lifetime import keep_groups_of_models
from distributor.node.host import use_host_name
from distributor.node.leash import EXIT, FAILURE, MANY_LINES, NOTICE, STARTED, VALUE, Leash
from distributor.node.leaving import (
    end_forked,
    exit_code_of,
    flush_files,
    flush_streams,
    leave,
)
from distributor.node.mlflow_run import follow_run
from distributor.node.order import Order
from distributor.node.printing import Streams
from distributor.node.process_title import set_run_title
from distributor.node.program import Module, Program, Script
from distributor.node.scratch import use_scratch
from distributor.node.stacks import answer_in
from distributor.node.telling import tell_in
from distributor.wire import parcel, pickling
from distributor.wire.outcome import failure_of

_STORES: list[object] = []
"""Rank 0's store serves the others for as long as the process lives: its end would cost time."""


def main(order: Order, at_the_end: list[Callable[[], object]]) -> None:
    """Be the rank that `order` describes, and end the process."""
    exit_code = [1]
    use_host_name(order.origin.host)
    set_run_title(f"rank {order.origin.rank}", order.program_name, order.run_id)
    if order.modules:
        sys.path[:0] = order.modules.split(os.pathsep)
    at_the_end += [flush_files, lambda: leave(exit_code[0])]
    leash = Leash(order, {MANY_LINES: Streams().expect_many_lines, NOTICE: notices.note})
    use_scratch(order.scratch)
    faulthandler.enable()
    answer_in(order.stacks)
    tell_in(order.progress)
    notices.tell_over(leash.tell)
    _STORES.append(_serve_store(order))
    leash.tell(STARTED)
    follow_run()
    keep_groups_of_models()
    try:
        succeeded = _run_and_record(order)
    except SystemExit as leaving:
        # A death like any other, told before exit handlers and threads take their time.
        exit_code[0] = exit_code_of(leaving)
        flush_streams()
        leash.tell(EXIT + bytes(exit_code))
        return
    exit_code[0] = 0 if succeeded else 1
    leash.tell(VALUE if succeeded else FAILURE)
    leash.await_release()


def _serve_store(order: Order) -> object:
    """Open the rendezvous store on the inherited socket, so that no port is ever guessed."""
    if order.listener is None:
        return None
    try:
        import torch.distributed as dist
    except ImportError:
        return None  # nobody in this run can ask for it
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        master_listen_fd=order.listener,
        wait_for_workers=False,
    )


def _run_and_record(order: Order) -> bool:
    """Run the program, and record its value or its failure; tell whether it succeeded."""
    with open(order.outcome, "wb") as file:
        try:
            value = _execute(_load_program(order.program))
            if order.keep_value:
                pickling.dump_value(value, file, what=f"rank {order.origin.rank}")
            return True
        except SystemExit:
            raise
        except BaseException as error:  # whatever it is, the driver wants to know
            failure = failure_of(error, order.origin, reached.step())
            file.seek(0)
            file.truncate()
            pickle.dump(failure, file)
            return False


def _load_program(descriptor: int) -> Program:
    program = parcel.unpack(descriptor)
    assert isinstance(program, Program)
    return program


def _execute(program: Program) -> Any:
    """Run the program, and finish what it began; leaving with code 0 is its way to return None."""
    rank = os.getpid()
    try:
        value = _returned(program)
        finish()
        return value
    finally:
        if os.getpid() != rank:
            end_forked(sys.exc_info()[1])


def _returned(program: Program) -> Any:
    try:
        return _call(program)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return None
        raise


def _call(program: Program) -> Any:
    if isinstance(program, Script):
        sys.argv = [program.path, *program.args]
        sys.path.insert(0, str(Path(program.path).parent))
        _begin(program)
        runpy.run_path(program.path, run_name="__main__")
        return None
    if isinstance(program, Module):
        sys.argv = [program.name, *program.args]
        if program.folder:
            sys.path.insert(0, program.folder)
        _begin(program)
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        return None
    sys.argv = [program.name]
    pickling.install_sources(program.call.sources)
    function, args, kwargs = program.call.load()
    _fill_main(function)
    _begin(program)
    return function(*args, **kwargs)


def _begin(program: Program) -> None:
    if program.begins_with:
        pkgutil.resolve_name(program.begins_with)()


def _fill_main(function: Any) -> None:
    """Put what travelled from the driver's ``__main__`` into this one.

    Whoever pickles by name here, as ``torch.save`` does, then finds a notebook's classes.
    """
    ours = vars(sys.modules["__main__"])
    travelled = getattr(getattr(function, "func", function), "__globals__", {})
    for name, value in list(travelled.items()):
        if getattr(value, "__module__", None) == "__main__":
            ours.setdefault(name, value)
