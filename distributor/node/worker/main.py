"""The main function of a rank: load the program, run it, and record its outcome."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import pkgutil
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from distributor._compat.torch import serve_store
from distributor.core.addresses import use_host_name
from distributor.core.module_search import find_at
from distributor.node.process.exit import (
    end_process,
    exit_code_of,
    exit_forked_child,
    flush_streams,
    kept_until_end,
)
from distributor.node.process.process_title import set_run_title
from distributor.node.process.scratch import create_scratch
from distributor.node.process.specs import WorkerSpec
from distributor.node.worker.control_channel import ControlChannel
from distributor.node.worker.libraries import (
    adapt_libraries,
    bind_to_numa_node,
    read_variables_at_import,
)
from distributor.node.worker.main_module import create_main_module
from distributor.node.worker.mlflow_hooks import install_mlflow_hooks
from distributor.node.worker.own_rendezvous import allow_own_rendezvous
from distributor.node.worker.stacks import enable_stack_dumps, write_collectives
from distributor.node.worker.stdio import StandardStreams
from distributor.rank.context import WorkerContext, enter_worker, finish_gpu_work
from distributor.rank.import_hooks import after_import
from distributor.rank.messages import (
    COLLECTIVES,
    EXIT,
    FAILURE,
    MANY_LINES,
    NOTICE,
    NOTICE_HERE,
    STARTED,
    VALUE,
)
from distributor.serialization import oob_pickle, pickling
from distributor.serialization.outcome import failure_of
from distributor.serialization.program import Call, Module, Program, Script, write_files


def main(worker_spec: WorkerSpec, at_exit: list[Callable[[], object]]) -> None:
    """Be the rank that `worker_spec` describes; `at_exit` is called when the interpreter exits."""
    exit_code, share = [1], worker_spec.share
    use_host_name(share.host)
    set_run_title(f"rank {worker_spec.origin.rank}", share.program_name, share.run_id)
    if share.modules:
        sys.path[:0] = share.modules.split(os.pathsep)
    at_exit += [lambda: end_process(exit_code[0])]
    control = ControlChannel(worker_spec)
    context = WorkerContext(control.send, worker_spec.progress)
    enter_worker(context)
    if share.settings.numa_binding and sys.platform == "linux":
        bind_to_numa_node(share.uses_gpus)
    control.listen(
        {
            MANY_LINES: StandardStreams().expect_many_lines,
            COLLECTIVES: lambda: write_collectives(worker_spec.scratch),
            NOTICE: lambda: context.preemption_notices.notify(here=False),
            NOTICE_HERE: lambda: context.preemption_notices.notify(here=True),
        }
    )
    context.secret = control.secret
    context.uses_gpus = share.uses_gpus
    context.data = worker_spec.data
    create_scratch(worker_spec.scratch)
    context.scratch = worker_spec.scratch
    faulthandler.enable()
    enable_stack_dumps(worker_spec.stacks)
    context.rendezvous = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves_others = worker_spec.listener is not None and os.environ["WORLD_SIZE"] != "1"
    if worker_spec.listener is not None:
        # Not before: a program may set variables that torch reads when it is imported.
        after_import("torch", partial(_serve_store, context, worker_spec.listener, os.getpid()))
    control.send(STARTED)
    allow_own_rendezvous(*context.rendezvous, share.run_id)
    install_mlflow_hooks()
    adapt_libraries(share.uses_gpus, context)
    try:
        succeeded = _run_program(worker_spec, context)
    except SystemExit as leaving:
        # A failure, sent before exit handlers and threads take their time.
        exit_code[0] = exit_code_of(leaving)
        flush_streams()
        control.send(EXIT + bytes(exit_code))
        return
    exit_code[0] = 0 if succeeded else 1
    control.send(VALUE if succeeded else FAILURE)
    if succeeded and serves_others and context.store is None:
        # Other ranks may use the store, although this one has not.
        threading.Thread(target=_import_torch, daemon=True).start()
    control.await_release()


def _serve_store(context: WorkerContext, listener: int, rank: int, _: ModuleType) -> None:
    """Open the rendezvous store on the inherited socket, so that no port is ever guessed."""
    if os.getpid() == rank:  # not in a process that the program has forked
        context.store = serve_store(*context.rendezvous, listener)


def _import_torch() -> None:
    with contextlib.suppress(Exception):  # without torch no rank of this run can use the store
        importlib.import_module("torch")


def _run_program(worker_spec: WorkerSpec, context: WorkerContext) -> bool:
    """Run the program, and record its value or failure; return whether it succeeded."""
    rank = os.getpid()
    with open(worker_spec.outcome, "wb") as file:
        try:
            try:
                value = _call(_load_program(worker_spec))
            except SystemExit as leaving:
                if leaving.code not in (None, 0):
                    raise
                value = None  # it counts as a return
            finish_gpu_work()
            context.run_final_steps()
            if os.getpid() == rank and worker_spec.keeps_value:
                pickling.dump_value(value, file, what=f"rank {worker_spec.origin.rank}")
            return True
        except SystemExit:
            raise
        except BaseException as error:  # the driver is to know of any
            if os.getpid() == rank:
                failure = failure_of(error, worker_spec.origin, context.completed_steps)
                file.seek(0)
                file.truncate()
                pickle.dump(failure, file)
                return False
            raise
        finally:
            if os.getpid() != rank:
                exit_forked_child(sys.exc_info()[1])


def _load_program(worker_spec: WorkerSpec) -> Program:
    """Load the program, and set the main module and the command line that it sees."""
    program = oob_pickle.unpack(worker_spec.program)
    assert isinstance(program, Program)
    create_main_module(worker_spec.program if isinstance(program, Call) else None)
    # To hide torch takes milliseconds, and a preloaded module may have imported it for the program.
    may_set_variables = not isinstance(program, Call) or program.call.uses_environment
    if may_set_variables and not worker_spec.has_preloads:
        read_variables_at_import()
    name = program.path if isinstance(program, Script) else program.name
    sys.argv = [name, *write_files(program.args, worker_spec.scratch)]
    return program


def _call(program: Program) -> Any:
    find_at(program.located)
    if isinstance(program, Script):
        sys.path.insert(0, program.folder)
        _call_hook(program)
        _keep_globals(lambda: runpy.run_path(program.path, run_name="__main__"))
        return None
    if isinstance(program, Module):
        if program.folder:
            sys.path.insert(0, program.folder)
        _call_hook(program)
        _keep_globals(lambda: runpy.run_module(program.name, run_name="__main__", alter_sys=True))
        return None
    pickling.install_sources(program.call.sources)
    function, args, kwargs = program.call.load(vars(sys.modules["__main__"]))
    kept_until_end.append(function)  # its globals may be those of no module
    _call_hook(program)
    return function(*args, **kwargs)


def _keep_globals(run: Callable[[], dict[str, Any]]) -> None:
    """Run a main module, and keep its globals until the end, as the interpreter does.

    `runpy` drops them. If they are in a reference cycle, the garbage collector could then free
    files in the wrong order, which loses what they hold back.
    """
    try:
        kept_until_end.append(run())
    except BaseException as error:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        kept_until_end.extend(
            frame.f_globals for frame in frames if frame.f_globals.get("__name__") == "__main__"
        )
        raise


def _call_hook(program: Program) -> None:
    """Call what the launcher wants to happen before the program starts."""
    if program.begins_with:
        pkgutil.resolve_name(program.begins_with)()
