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

from distributor._compat.torch import serve_store
from distributor.core.host import use_host_name
from distributor.node.process.exit import (
    exit_code_of,
    exit_forked_child,
    exit_process,
    flush_open_files,
    flush_streams,
)
from distributor.node.process.process_title import set_run_title
from distributor.node.process.scratch import create_scratch
from distributor.node.process.worker_spec import WorkerSpec
from distributor.node.worker import failing_step, preemption_notices
from distributor.node.worker.control_channel import (
    EXIT,
    FAILURE,
    MANY_LINES,
    NOTICE,
    STARTED,
    VALUE,
    ControlChannel,
)
from distributor.node.worker.group_lifetime import keep_groups_of_models
from distributor.node.worker.mlflow_hooks import install_mlflow_hooks
from distributor.node.worker.shutdown import finish
from distributor.node.worker.stack_dump import answer_in
from distributor.node.worker.stdio import Streams
from distributor.node.worker.telemetry import tell_in
from distributor.serialization import oob_pickle, pickling
from distributor.serialization.outcome import failure_of
from distributor.serialization.program import Module, Program, Script

_STORES: list[object] = []
"""Rank 0's store serves the others for as long as the process lives: its end would cost time."""


def main(worker_spec: WorkerSpec, at_the_end: list[Callable[[], object]]) -> None:
    """Be the rank that `worker_spec` describes, and end the process."""
    exit_code = [1]
    use_host_name(worker_spec.origin.host)
    set_run_title(f"rank {worker_spec.origin.rank}", worker_spec.program_name, worker_spec.run_id)
    if worker_spec.modules:
        sys.path[:0] = worker_spec.modules.split(os.pathsep)
    at_the_end += [flush_open_files, lambda: exit_process(exit_code[0])]
    control = ControlChannel(
        worker_spec, {MANY_LINES: Streams().expect_many_lines, NOTICE: preemption_notices.note}
    )
    create_scratch(worker_spec.scratch)
    faulthandler.enable()
    answer_in(worker_spec.stacks)
    tell_in(worker_spec.progress)
    preemption_notices.tell_over(control.tell)
    _STORES.append(_serve_store(worker_spec))
    control.tell(STARTED)
    install_mlflow_hooks()
    keep_groups_of_models()
    try:
        succeeded = _run_and_record(worker_spec)
    except SystemExit as leaving:
        # A death like any other, told before exit handlers and threads take their time.
        exit_code[0] = exit_code_of(leaving)
        flush_streams()
        control.tell(EXIT + bytes(exit_code))
        return
    exit_code[0] = 0 if succeeded else 1
    control.tell(VALUE if succeeded else FAILURE)
    control.await_release()


def _serve_store(worker_spec: WorkerSpec) -> object:
    """Open the rendezvous store on the inherited socket, so that no port is ever guessed."""
    if worker_spec.listener is None:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return serve_store(host, port, worker_spec.listener)
    except ImportError:
        return None  # without torch nobody in this run can ask for it


def _run_and_record(worker_spec: WorkerSpec) -> bool:
    """Run the program, and record its value or its failure; tell whether it succeeded."""
    with open(worker_spec.outcome, "wb") as file:
        try:
            value = _execute(_load_program(worker_spec.program))
            if worker_spec.keep_value:
                pickling.dump_value(value, file, what=f"rank {worker_spec.origin.rank}")
            return True
        except SystemExit:
            raise
        except BaseException as error:  # whatever it is, the driver wants to know
            failure = failure_of(error, worker_spec.origin, failing_step.step())
            file.seek(0)
            file.truncate()
            pickle.dump(failure, file)
            return False


def _load_program(descriptor: int) -> Program:
    program = oob_pickle.unpack(descriptor)
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
            exit_forked_child(sys.exc_info()[1])


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
