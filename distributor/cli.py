"""The command line: ``distributor run``, ``doctor``, ``clean`` and ``demo``."""

from __future__ import annotations

import argparse
import dataclasses
import re
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from distributor.cli_options import make_parser
from distributor.core.spelling import Spelling
from distributor.core.text import printable
from distributor.errors import WorkerDied
from distributor.launch.application import application, check_application
from distributor.launch.hangs.stack_requests import stacks
from distributor.launch.output.screen import SCREEN
from distributor.launch.programs import module_of, program_of
from distributor.launch.setting_types import check_num_processes
from distributor.launch.settings import Settings
from distributor.node.worker.stacks import append_stacks
from distributor.torch_distributor import TorchDistributor

_SPELLING = Spelling(
    "distributor run", "--nproc", "leave out --cluster", "pass --cpu", has_options=True
)
BAD_INPUT, FAILED, TIMED_OUT, INTERRUPTED = 2, 1, 124, 130


class _Distributor(TorchDistributor):
    """Names in messages what the user of the command line wrote."""

    spelling = _SPELLING


class _Settings(Settings):
    """The same, without a plan, which needs Spark."""

    spelling = _SPELLING


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        The exit code: 0 for success; the script's own code if a rank exited with one; 128 plus the
        signal's number if a rank was killed; 124 after a timeout; 130 after Ctrl-C; 2 for bad
        input, before anything is launched; 1 for any other failure, and for checks of ``doctor``
        that failed.
    """
    options = make_parser().parse_args(argv)
    try:
        return _COMMANDS[options.command](options) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _report(error)


def _run(options: argparse.Namespace) -> None:
    settings = _fields_of(TorchDistributor, vars(options))
    if "env" in settings:
        settings["env"] = dict(settings["env"])
    args = options.args[1:] if options.args[:1] == ["--"] else options.args
    program: Any = module_of(options.script) if options.module else options.script
    program_of(program, (), {})
    with _cluster(options, settings) if "local_mode" in settings else _local(options):
        if hasattr(signal, "SIGQUIT"):
            signal.signal(signal.SIGQUIT, _show_stacks)
        _Distributor(**settings).run(program, *args)


def _local(options: argparse.Namespace) -> AbstractContextManager[object]:
    if options.master or options.conf:
        flag = "--master" if options.master else "--conf"
        raise ValueError(f"{flag} applies to Spark, but --cluster is missing: add --cluster.")
    return nullcontext()


def _cluster(
    options: argparse.Namespace, settings: Mapping[str, Any]
) -> AbstractContextManager[object]:
    """Check all input, because Spark takes long to start, and return the Spark application."""
    check_num_processes(_SPELLING.num_processes, settings.get("num_processes", 1))
    _Settings(**_fields_of(Settings, settings))
    return _application(options)


def _application(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """Check the options for Spark, and return its application."""
    conf = dict(options.conf)
    master = options.master or conf.pop("spark.master", None)
    check_application(master, conf)
    return application(master, conf)


def _fields_of(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _show_stacks(*_: object) -> None:
    """Print the ranks' stacks, on another thread, because this one waits for the run."""

    def show() -> None:
        for run_id, found in stacks().items():
            SCREEN.print_message(append_stacks(f"Run {run_id} continues.", found))

    threading.Thread(target=show, name="stacks", daemon=True).start()


def _doctor(options: argparse.Namespace) -> int:
    from distributor.diagnosis.examination import examine_cluster, examine_here
    from distributor.diagnosis.settings import Wanted

    wanted = Wanted(**_fields_of(Wanted, vars(options)))
    if options.cluster:
        report = examine_cluster(wanted, lambda: _application(options))
    else:
        _local(options)
        report = examine_here(wanted)
    print(report.to_json() if options.json else printable(str(report)))
    return FAILED if report.failures else 0


def _clean(options: argparse.Namespace) -> None:
    from distributor.cleaning import clean

    for line in clean(options.days, dry_run=options.dry_run):
        print(printable(line))


def _demo(options: argparse.Namespace) -> None:
    from distributor.demo import demo

    demo()


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "run": _run,
    "doctor": _doctor,
    "clean": _clean,
    "demo": _demo,
}


def _report(error: Exception) -> int:
    """Print an error, and return the exit code."""
    from_rank = hasattr(error, "rank_failures")
    if from_rank:
        # The cause has the rank's traceback, and starts with the rank's name, as the note does.
        notes = re.sub(r"^Raised by .*\n?", "", "\n".join(getattr(error, "__notes__", [])))
        text = f"{error.__cause__ or error}\n{notes}".strip()
        SCREEN.print_message(f"distributor: {type(error).__name__}: {text}")
    elif isinstance(error, _EXPECTED):
        SCREEN.print_message(f"distributor: {type(error).__name__}: {error}")
    else:
        SCREEN.clear_line()
        traceback.print_exception(error)
    if isinstance(error, WorkerDied):
        return error.exit_code or 128 + (error.signal or 0)
    if from_rank:
        return FAILED
    return next((code for kinds, code in _EXIT_CODES if isinstance(error, kinds)), FAILED)


_EXPECTED = (RuntimeError, ValueError, TypeError, OSError, ModuleNotFoundError)
_EXIT_CODES: list[tuple[Any, int]] = [
    (TimeoutError, TIMED_OUT),
    (
        (
            ValueError,
            TypeError,
            FileNotFoundError,
            IsADirectoryError,
            NotADirectoryError,
            ModuleNotFoundError,
            SyntaxError,
        ),
        BAD_INPUT,
    ),
]
