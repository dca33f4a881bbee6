"""What is to be run, how, and for how long."""

from __future__ import annotations

import fnmatch
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal, Protocol

from distributor.core.addresses import checked_port, port_range, split_address
from distributor.core.checkpoint_config import check_name
from distributor.core.gpus import GPUType
from distributor.core.telemetry import Progress, Reported
from distributor.launch.call_site import CallSite
from distributor.launch.cancellation import Cancellation
from distributor.launch.defaults import NOT_GIVEN, complete, folder
from distributor.launch.graceful_shutdown import Preemption
from distributor.launch.run_progress import RunProgress
from distributor.launch.spark.environments import Environment, check_environment
from distributor.launch.spark.user_modules import check_py_modules
from distributor.launch.stack_requests import Inquiry
from distributor.node.agent.sink import Sink
from distributor.node.agent.worker_env import RANK_VARIABLES
from distributor.serialization import pickling
from distributor.serialization.outcome import Failure, Outcome
from distributor.serialization.program import Call, Module, Program, Script
from distributor.wire.messages import Stream


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is launched and watched; checked when it is built.

    Parameters
    ----------
    env : mapping of str to str, optional
        Environment variables for every rank.
    forward_env : sequence of str
        Variables of this process that every rank has too, by name or pattern, such as "HF_*".
    timeout : float, optional
        Seconds that the run may take once its ranks have started; None for no bound.
    start_timeout : float
        Seconds that may pass until all ranks are up, the wait for free slots included.
    log_dir : str or path, optional
        Folder on the driver that keeps every rank's whole output, in files such as
        ``<log_dir>/<run id>/attempt_0/rank3.stderr``. A node without a link to the driver writes
        its ranks' files there on its own disk. The default is that of DISTRIBUTOR_LOG_DIR,
        spark.distributor.logDir, or none.
    show_output : "all", "none" or ranks
        Whose output is shown here as it comes.
    hub_address : str, optional
        Where this process listens for the nodes: ``host``, ``host:port``, ``[IPv6]`` or
        ``[IPv6]:port``; by default the address of Spark's driver and `hub_port`.
    hub_port : int
        The port, unless `hub_address` has one; 0 for a free one. All runs of this process share it.
        The default is that of DISTRIBUTOR_HUB_PORT, spark.distributor.hub.port, or 0.
    rank_ports : str, optional
        The ports that rank 0's store may have, such as "29500-29599"; each run takes one. The
        default is that of DISTRIBUTOR_RANK_PORTS, spark.distributor.rank.ports, or any free port.
    warm : bool
        Whether ranks are forked from a process that each node keeps, with torch imported, for this
        and later runs; otherwise, and always on macOS, each starts a fresh interpreter. The
        default is that of DISTRIBUTOR_WARM (0 or 1), spark.distributor.warm, or True.
    preload : sequence of str
        Modules that this process imports too; none of them may touch CUDA or start threads.
    gpu_type : GPUType or str, optional
        What the GPUs have to be, such as "H100", in either case; by default anything.
    pool : str, optional
        The pool of Spark's fair scheduler in which the job waits for slots; by default the one
        that the calling thread has set.
    mlflow_ranks : "first" or "all"
        Whose calls of MLflow log to the job's run; the others' do nothing.
    storage_path : str or path, optional
        Where ``distributor.train.report`` keeps checkpoints: a path that all nodes see, or an
        address such as ``s3://bucket/runs``.
    name : str, optional
        The folder in it. A name that is used again goes on from what is there; by default it is
        the run's own.
    environment : path or sequence of str, optional
        What ranks run in: a packed virtual environment (venv-pack, conda-pack), or requirements
        that pip installs once on each node; by default the interpreter that is there.
    py_modules : sequence of str or path
        Modules and packages, by name, and files and folders, by path, that ranks can import, beside
        those that the program imports by a statement: plug-ins that are imported by a computed
        name, say.
    listeners : sequence of Listener
        Who hears in this process what the ranks print, tell and report.
    """

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    forward_env: Sequence[str] = ()
    timeout: float | None = None
    start_timeout: float = 600.0
    log_dir: str | os.PathLike[str] | None = NOT_GIVEN
    show_output: Literal["all", "none"] | Collection[int] = "all"
    hub_address: str | None = None
    hub_port: int = NOT_GIVEN
    rank_ports: str | None = NOT_GIVEN
    warm: bool = NOT_GIVEN
    preload: Sequence[str] = ()
    gpu_type: GPUType | str | None = None
    pool: str | None = None
    mlflow_ranks: str = "first"
    storage_path: str | os.PathLike[str] | None = None
    name: str | None = None
    max_failures: int = 0
    environment: Environment = None
    py_modules: Sequence[str | os.PathLike[str]] = ()
    listeners: Sequence[Listener] = ()

    def __post_init__(self) -> None:
        complete(self)
        _check_env(self.env)
        _check_words("forward_env", self.forward_env, "variables, such as ['HF_*']")
        _check_seconds("timeout", self.timeout)
        _check_seconds("start_timeout", self.start_timeout)
        _check_ranks(self.show_output)
        folder("log_dir", self.log_dir)
        self._check_ports()
        _check_words("preload", self.preload, "modules, such as ['lightning']")
        _check_gpu_type(self.gpu_type)
        _check_pool(self.pool)
        _check_storage(self.storage_path, self.name)
        check_max_failures(self.max_failures)
        if self.mlflow_ranks not in ("first", "all"):
            raise ValueError(f"mlflow_ranks is 'first' or 'all', but is {self.mlflow_ranks!r}.")
        check_environment(self.environment)
        check_py_modules(self.py_modules)
        _check_listeners(self.listeners)

    def _check_ports(self) -> None:
        port_range("rank_ports", self.rank_ports)
        checked_port("hub_port", self.hub_port)
        if self.hub_address is not None:
            split_address("hub_address", self.hub_address)

    @property
    def forwarded(self) -> dict[str, str]:
        """The variables of this process that ranks have too, less those that say who a rank is."""
        return {
            name: value
            for name, value in os.environ.items()
            if name not in RANK_VARIABLES
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.forward_env)
        }

    @property
    def wanted_type(self) -> str | None:
        """The GPUs' type in capitals, as nodes are asked for it."""
        return None if self.gpu_type is None else GPUType(self.gpu_type.upper()).value

    def shows(self, rank: int) -> bool:
        """Tell whether a rank's output is shown."""
        if isinstance(self.show_output, str):
            return self.show_output == "all"
        return rank in self.show_output


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: what each rank does, on how many, and with what settings.

    Parameters
    ----------
    num_processes : int
        How many ranks; the most, where there may be fewer.
    min_processes : int
        How few there may be, where the cluster has no room for more.
    silent : tuple of str
        Hosts that stopped answering in the attempt before.
    failures : list of Failure
        Those of this attempt's ranks, in the order in which this process learned of them.
    env : mapping of str to str
        Variables for every rank: the user's, and what else this run brings.
    listeners : tuple of Listener
        Who hears what the ranks print and tell, beside the console.
    call_site : CallSite
        The user's line that started the run; where this job was made, by default.
    """

    program: Program
    num_processes: int
    min_processes: int
    settings: Settings
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    keep_all: bool = False
    listeners: tuple[Listener, ...] = ()
    run_id: str = field(default_factory=lambda: new_run_id())
    call_site: CallSite = field(default_factory=lambda: CallSite.of_caller("run"))
    attempt: int = 0
    silent: tuple[str, ...] = ()
    failures: list[Failure] = field(default_factory=list)
    standing: RunProgress = field(default_factory=RunProgress)
    inquiry: Inquiry = field(default_factory=Inquiry)
    cancellation: Cancellation = field(default_factory=Cancellation)
    preemption: Preemption = field(default_factory=Preemption)

    @property
    def heading(self) -> str:
        """Say what begins: the run's id, what it runs, and where its output is kept."""
        log_dir = self.settings.log_dir
        suffix = f", attempt {self.attempt}" if self.attempt else ""
        kept = f", whose output is kept in {Path(log_dir) / self.run_id}" if log_dir else ""
        return f"Run {self.run_id} of {self.program.name}{suffix}{kept}"

    def for_attempt(self, attempt: int, silent: tuple[str, ...]) -> Job:
        """Give the job for a new attempt, of which nothing is known yet."""
        return replace(
            self,
            attempt=attempt,
            silent=silent,
            failures=[],
            standing=RunProgress(),
            inquiry=Inquiry(),
        )


class Listener:
    """Hears what becomes of a run; its methods are called on one thread, and are to be quick.

    Each does nothing, for those that one is not interested in. What one of them raises ends the
    run, and is raised; none of them is called after that.
    """

    def begins(self, attempt: int, ranks: int) -> None:
        """Hear that an attempt begins, on so many ranks."""

    def printed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Hear what a rank printed."""

    def progressed(self, rank: int, progress: Progress) -> None:
        """Hear how far a rank is."""

    def used(self, usage: Progress) -> None:
        """Hear what a node's processors, memory and GPUs do."""

    def reported(self, report: Reported) -> None:
        """Hear what all ranks have given to `distributor.train.report`."""

    def failed(self, attempt: int, error: Exception) -> None:
        """Hear that an attempt failed; ``error.rank_failures`` has each rank's failure."""


LOCAL_TRAINING = "local training with {} processes"
CLUSTER_TRAINING = "distributed training with {} executor processes"
"""How messages name a run, as those of PySpark's class do."""


class Launcher(Protocol):
    """Brings a job's ranks up somewhere and watches them to their end."""

    @property
    def shares_disk(self) -> bool:
        """Whether the ranks certainly reach files that are on this machine."""

    @property
    def training(self) -> str:
        """How messages name a run here; has a place for the number of ranks."""

    def prepare(self, settings: Settings, num_processes: int) -> None:
        """Begin what the first run would otherwise have to wait for."""

    def resolve_size(self, job: Job) -> tuple[Launcher, int]:
        """Give the launcher of as many of the job's ranks as there is room for, and how many."""

    def launch(self, job: Job, sink: Sink) -> list[Outcome]:
        """Run all ranks; give the outcomes of those that ended by themselves."""

    def describe(self) -> dict[str, object]:
        """Say where ranks are launched, for the record."""

    def thread(self, target: Callable[[], object]) -> threading.Thread:
        """Make a thread on which a run can be launched for the calling one."""


def program_of(
    train_object: Callable[..., Any] | str | os.PathLike[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Program:
    """Make the program from what the user gave to ``run``.

    Raises
    ------
    TypeError
        For what is neither a callable nor a path, and a script's arguments given by name.
    FileNotFoundError, IsADirectoryError
        For a path that is no file.
    UnpicklableError
        For a callable or argument that cannot be sent to the ranks; names the culprit.
    """
    if isinstance(train_object, Module):
        return replace(train_object, args=tuple(map(str, args)))
    if isinstance(train_object, (str, os.PathLike)):
        return _script(Path(train_object), args, kwargs)
    if not callable(train_object):
        raise TypeError(
            "run takes a callable or the path of a Python script, "
            f"but got {train_object!r} of type {_type_of(train_object)}."
        )
    call = pickling.dump_call(train_object, args, kwargs)
    return Call(pickling.name_of(train_object), call)


def module_of(name: str) -> Module:
    """Return the program that runs a module of this name, as ``python -m`` would find it.

    No package is imported for that.

    Raises
    ------
    ModuleNotFoundError
        If there is no such module, or it is a package without a ``__main__`` module.
    """
    folder = os.getcwd()
    path: Sequence[str] = [folder, *sys.path]
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find_module(".".join(parts[:end]), path)
        path = list(spec.submodule_search_locations or ())
    if path:
        _find_module(f"{name}.__main__", path)
    return Module(name, folder)


def _find_module(name: str, path: Sequence[str]) -> ModuleSpec:
    if spec := PathFinder.find_spec(name, path):
        return spec
    raise ModuleNotFoundError(
        f"There is no module {name} (looked from {Path.cwd()}, and in sys.path). "
        "Name it as 'python -m' takes it, such as package.train.",
        name=name,
    )


def check_num_processes(num_processes: object) -> tuple[int, int]:
    """Check a number of ranks, or a (minimum, maximum) pair; return it as a pair.

    The words are PySpark's where it has some.
    """
    if isinstance(num_processes, tuple) and len(num_processes) == 2:
        min_processes, max_processes = (_checked_count(count) for count in num_processes)
        if min_processes > max_processes:
            raise ValueError(
                f"num_processes is (minimum, maximum), but is {num_processes}: its minimum is "
                "above its maximum."
            )
        return min_processes, max_processes
    count = _checked_count(num_processes)
    return count, count


def _checked_count(num_processes: object) -> int:
    if isinstance(num_processes, bool) or not hasattr(num_processes, "__index__"):
        raise TypeError(
            "num_processes has to be a positive integer, but is "
            f"{num_processes!r} of type {_type_of(num_processes)}."
        )
    count = int(num_processes.__index__())
    if count <= 0:
        raise ValueError(f"num_processes has to be a positive integer, but is {count}.")
    return count


def _script(path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Script:
    if kwargs:
        raise TypeError(
            f"A script takes no keyword arguments, but got {sorted(kwargs)}. "
            "Give them as command-line arguments: run('train.py', '--epochs=3')."
        )
    if path.is_dir():
        raise IsADirectoryError(f"run needs the path of a Python script, but {path} is a folder.")
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no script {path} (looked from {Path.cwd()}). "
            "A path is read on the driver and sent to the nodes that do not have it."
        )
    path = path.absolute()
    return Script(path.name, str(path), tuple(map(str, args)), path.read_bytes())


def check_max_failures(count: object) -> None:
    """Check how many failures are made good by another attempt."""
    if isinstance(count, bool) or not isinstance(count, int) or count < -1:
        raise ValueError(
            f"max_failures is a number of attempts that may fail, -1 for any, but is {count!r}."
        )


def _check_env(env: Mapping[str, str]) -> None:
    if not isinstance(env, Mapping):
        raise TypeError(f"env maps strings to strings, but is {env!r} of type {_type_of(env)}.")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(
                f"env maps strings to strings, but has {name!r}: {value!r} "
                f"({_type_of(name)} to {_type_of(value)})."
            )
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"env has {name!r}, which is no name of an environment variable.")
        if "\0" in value:
            raise ValueError(f"env has a NUL character in {name}, which no variable can hold.")
        if name in RANK_VARIABLES:
            raise ValueError(f"env cannot set {name}: it says who a rank is, and differs by rank.")


def _check_seconds(name: str, seconds: float | None) -> None:
    if seconds is None and name == "timeout":
        return
    unbound = " (None for no bound)" if name == "timeout" else ""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} is a number of seconds{unbound}, but is {seconds!r}.")
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(
            f"{name} is a positive, finite number of seconds{unbound}, but is {seconds!r}."
        )


def _check_ranks(shown: object) -> None:
    if isinstance(shown, str):
        valid = shown in ("all", "none")
    else:
        valid = isinstance(shown, Collection) and all(
            isinstance(rank, int) and rank >= 0 for rank in shown
        )
    if not valid:
        raise ValueError(f"show_output is 'all', 'none' or ranks such as [0], but is {shown!r}.")


def _check_words(name: str, words: object, what: str) -> None:
    if (
        isinstance(words, str)
        or not isinstance(words, Sequence)
        or not all(isinstance(word, str) for word in words)
    ):
        raise TypeError(f"{name} lists {what}, but is {words!r}.")


def _check_gpu_type(gpu_type: object) -> None:
    known = [kind.value for kind in GPUType]
    if gpu_type is not None and (not isinstance(gpu_type, str) or gpu_type.upper() not in known):
        raise ValueError(f"gpu_type is one of {', '.join(known)}, but is {gpu_type!r}.")


def _check_pool(pool: object) -> None:
    if pool is not None and not (isinstance(pool, str) and pool):
        raise ValueError(f"pool is the name of a pool of Spark's fair scheduler, but is {pool!r}.")


def _check_storage(storage_path: object, name: object) -> None:
    if storage_path is not None and not isinstance(storage_path, (str, os.PathLike)):
        raise TypeError(f"storage_path is a path or an address, but is {storage_path!r}.")
    if name is not None:
        check_name("name", name)
    if name is not None and storage_path is None:
        raise ValueError(f"name is {name!r}, but there is no storage_path for it to be in.")


def _check_listeners(listeners: object) -> None:
    if not isinstance(listeners, Sequence) or not all(isinstance(x, Listener) for x in listeners):
        raise TypeError(f"listeners are objects of class Listener, but are {listeners!r}.")


def _type_of(thing: object) -> str:
    return type(thing).__name__


def new_run_id() -> str:
    """Name a run as no other is named."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
