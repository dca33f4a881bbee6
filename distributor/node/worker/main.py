"""The main function of a rank: load the program, run it, and record its outcome."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import pickle
import pkgutil
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from distributor._compat.torch import serve_store
from distributor.core.addresses import use_host_name
from distributor.core.files import create_scratch
from distributor.core.module_search import find_at
from distributor.core.processes import POLL_SECONDS, exists, set_run_title
from distributor.node.process.exit import (
    end_process,
    exit_code_of,
    exit_forked_child,
    flush_streams,
    kept_until_end,
)
from distributor.node.process.specs import WorkerSpec
from distributor.node.worker import libraries
from distributor.node.worker.control_channel import ControlChannel
from distributor.node.worker.main_module import create_main_module
from distributor.node.worker.mlflow_hooks import install_mlflow_hooks
from distributor.node.worker.stacks import enable_stack_dumps, write_collectives
from distributor.rank import messages
from distributor.rank.context import (
    WorkerContext,
    connect_store,
    enter_worker,
    finish_gpu_work,
)
from distributor.rank.import_hooks import after_import
from distributor.rank.membership import Members, Membership
from distributor.rank.step_clock import StepClock
from distributor.serialization import pickling
from distributor.serialization.outcome import failure_of
from distributor.serialization.program import Call, Script, load_program, write_files

BATCH_SECONDS = 0.005
"""Seconds between two writes while a rank prints very many lines; a crash loses no more."""
QUIET_BATCHES = 20
"""Batches without output after which each line is written at once again."""


class StandardStreams:
    """Stdout and stderr of a rank; created once, before anything is printed."""

    def __init__(self) -> None:
        self._in_batches = False
        self._streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
        for stream in self._streams:
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        # A child that is forked while another thread flushes would wait for its lock forever.
        self._lock = threading.Lock()
        os.register_at_fork(
            before=self._prepare_fork,
            after_in_parent=self._lock.release,
            after_in_child=self._begin_in_child,
        )

    def expect_many_lines(self) -> None:
        """Write in batches from now on, until output slows down. Can be called from any thread."""
        with self._lock:
            if self._in_batches:
                return
            self._in_batches = True
            self._reconfigure(line_buffering=False)
        threading.Thread(target=self._write_batches, name="batches", daemon=True).start()

    def _prepare_fork(self) -> None:
        self._lock.acquire()
        self._flush()

    def _begin_in_child(self) -> None:
        self._lock.release()
        self._write_by_line()

    def _write_batches(self) -> None:
        quiet = 0
        while quiet < QUIET_BATCHES:
            time.sleep(BATCH_SECONDS)
            before = self._file_sizes()
            with self._lock:
                self._flush()
            quiet = quiet + 1 if self._file_sizes() == before else 0
        with self._lock:
            self._write_by_line()

    def _write_by_line(self) -> None:
        if self._in_batches:
            self._reconfigure(line_buffering=True)
            self._in_batches = False

    def _reconfigure(self, line_buffering: bool) -> None:
        for stream in self._streams:
            with contextlib.suppress(ValueError):  # it is closed
                stream.reconfigure(line_buffering=line_buffering)

    def _flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(ValueError):
                stream.flush()

    @staticmethod
    def _file_sizes() -> int:
        return sum(os.fstat(descriptor).st_size for descriptor in (1, 2))


def main(worker_spec: WorkerSpec, at_exit: list[Callable[[], object]]) -> None:
    """Be the rank that `worker_spec` describes; `at_exit` is called when the interpreter exits."""
    exit_code, share = [1], worker_spec.share
    use_host_name(share.host)
    name = "store" if worker_spec.role == "store" else f"rank {worker_spec.origin.rank}"
    set_run_title(name, share.program_name, share.run_id)
    if share.modules:
        sys.path[:0] = share.modules.split(os.pathsep)
    at_exit += [lambda: end_process(exit_code[0])]
    control = ControlChannel(worker_spec)
    clock = StepClock(worker_spec.counters)
    context = WorkerContext(control.send, worker_spec.progress, clock)
    enter_worker(context)
    if share.settings.numa_binding and sys.platform == "linux":
        libraries.bind_to_numa_node(share.uses_gpus)
    handlers: dict[bytes, Callable[[], object]] = {
        messages.MANY_LINES: StandardStreams().expect_many_lines,
        messages.COLLECTIVES: lambda: write_collectives(worker_spec.scratch),
        messages.NOTICE: lambda: context.preemption_notices.notify(here=False),
        messages.NOTICE_HERE: lambda: context.preemption_notices.notify(here=True),
    }
    context.rendezvous = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if share.goes_on:
        context.membership = members = Membership(
            worker_spec.origin.rank,
            share.world_size,
            context.send,
            context.rendezvous,
            connect_store,
            joins=worker_spec.role == "replacement",
            num_reports=lambda: context.completed_steps,
        )
        read = control.read_line
        handlers[messages.MEMBERS] = lambda: members.notify(Members.from_line(read()))
    control.listen(handlers)
    context.secret = control.secret
    context.uses_gpus = share.uses_gpus
    context.data = worker_spec.data
    create_scratch(worker_spec.scratch)
    context.scratch = worker_spec.scratch
    faulthandler.enable()
    enable_stack_dumps(worker_spec.stacks)
    serves_others = worker_spec.listener is not None and os.environ["WORLD_SIZE"] != "1"
    if worker_spec.listener is not None:
        # Not before: a program may set variables that torch reads when it is imported.
        after_import("torch", partial(_serve_store, context, worker_spec.listener, os.getpid()))
    if worker_spec.role == "store":
        # For each connection, torch looks up the name of its host, and serves nobody meanwhile.
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
        _import_torch()
        control.await_release()
        return
    control.send(messages.STARTED)
    while worker_spec.former and exists(worker_spec.former):
        time.sleep(POLL_SECONDS)
    libraries.allow_own_rendezvous(*context.rendezvous, share.run_id)
    install_mlflow_hooks()
    libraries.adapt_libraries(share.uses_gpus, context)
    if context.membership is not None:
        libraries.follow_members(context.membership, context)
    try:
        succeeded = _run_program(worker_spec, context)
    except SystemExit as leaving:
        # A failure, sent before exit handlers and threads take their time.
        exit_code[0] = exit_code_of(leaving)
        flush_streams()
        control.send(messages.EXIT + bytes(exit_code))
        return
    exit_code[0] = 0 if succeeded else 1
    control.send(messages.VALUE if succeeded else messages.FAILURE)
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
                value = _load_program(worker_spec)()
            except SystemExit as leaving:
                if leaving.code not in (None, 0):
                    raise
                value = None  # it counts as a return
            finish_gpu_work()
            context.run_final_steps()
            members = context.membership
            number = worker_spec.origin.rank if members is None else members.rank
            if os.getpid() == rank and (worker_spec.share.keep_all or number == 0):
                pickling.dump_value(value, file, what=f"rank {worker_spec.origin.rank}")
            return True
        except SystemExit:
            raise
        except BaseException as error:  # the driver is to know of any
            if os.getpid() == rank:
                failure = failure_of(error, worker_spec.origin, context.num_steps)
                file.seek(0)
                file.truncate()
                pickle.dump(failure, file)
                return False
            raise
        finally:
            if os.getpid() != rank:
                exit_forked_child(sys.exc_info()[1])


def _load_program(worker_spec: WorkerSpec) -> Callable[[], Any]:
    """Set the main module and the command line that the program sees; return what runs it."""
    program = load_program(worker_spec.program)
    create_main_module(worker_spec.program if isinstance(program, Call) else None)
    # To hide torch takes milliseconds, and a preloaded module may have imported it for the program.
    may_set_variables = not isinstance(program, Call) or program.uses_environment
    if may_set_variables and not worker_spec.has_preloads:
        libraries.read_variables_at_import()
    name = program.path if isinstance(program, Script) else program.name
    sys.argv = [name, *write_files(program.args, worker_spec.scratch)]
    find_at(program.located)
    if isinstance(program, Call):
        function, args, kwargs = program.load(vars(sys.modules["__main__"]))
        kept_until_end.append(function)  # its globals may be those of no module
        run = partial(function, *args, **kwargs)
    else:
        is_script = isinstance(program, Script)
        run = partial(_run_main, runpy.run_path if is_script else _run_module, name)
        if program.folder:
            sys.path.insert(0, program.folder)
    if program.begins_with:  # what the launcher wants to happen before
        pkgutil.resolve_name(program.begins_with)()
    return run


_run_module = partial(runpy.run_module, alter_sys=True)


def _run_main(run: Callable[..., dict[str, Any]], name: str) -> None:
    """Run a main module, and keep its globals until the end, as the interpreter does.

    `runpy` drops them. If they are in a reference cycle, the garbage collector could then free
    files in the wrong order, which loses what they hold back.
    """
    try:
        kept_until_end.append(run(name, run_name="__main__"))
    except BaseException as error:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        kept_until_end.extend(
            frame.f_globals for frame in frames if frame.f_globals.get("__name__") == "__main__"
        )
        raise
