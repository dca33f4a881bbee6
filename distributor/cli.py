"""The command line: ``distributor run``, ``doctor``, ``clean`` and ``demo``."""

from __future__ import annotations

import argparse
import dataclasses
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from distributor.control.stack_requests import stacks
from distributor.core.spelling import Spelling, suggestion
from distributor.core.text import printable
from distributor.diagnosis.settings import Wanted
from distributor.errors import WorkerDied
from distributor.node.worker.stacks import append_stacks
from distributor.programs.programs import module_of, program_of
from distributor.run.settings import Settings
from distributor.screen.screen import SCREEN
from distributor.settings.fields import help_of, setting_fields
from distributor.settings.types import check_num_processes, read_pair
from distributor.spark.application import application, check_application
from distributor.torch_distributor import TorchDistributor
from distributor.version import __version__

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
    """Run the command line."""
    options = make_parser().parse_args(argv)
    try:
        return _COMMANDS[options.command](options) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _report(error)


def _run(options: argparse.Namespace) -> None:
    settings = _fields_of(TorchDistributor, vars(options))
    for name in ("env", "executor_resources") & settings.keys():
        settings[name] = dict(settings[name])
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


class _Parser(argparse.ArgumentParser):
    """Answers an unknown option with the one that was likely meant."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; exit with 2 if they are invalid."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            option, *_ = unknown[0].split("=")
            known = getattr(parsed, "known_options", [])
            self.error(f"unrecognized argument: {option}. {suggestion(option, known)}".strip())
        return parsed


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. Parsed options have the name of the command in ``command``."""
    parser = _Parser(prog="distributor", description="Run PyTorch on Spark.")
    parser.add_argument("--version", action="version", version=f"distributor {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run a script or module on several ranks",
        usage="distributor run [options] (script.py | -m package.module) [-- args ...]",
        argument_default=argparse.SUPPRESS,
    )
    known = ["--master", "--conf", "--module"]
    run.set_defaults(command="run", known_options=known)
    for field in setting_fields(TorchDistributor):
        known += _add_options(run, field, help_of(field).replace("%", "%%"))
    _add_spark_options(run)
    run.add_argument(
        "-m",
        "--module",
        action="store_true",
        default=False,
        help="run a module, as python -m does, instead of a script",
    )
    run.add_argument("script", help="the Python script, or with -m the module's name")
    args = run.add_argument(
        "args", nargs=argparse.REMAINDER, help="arguments of the script or module, after --"
    )
    args.required = False  # the error without a script would name it too

    _add_doctor(commands)
    clean = commands.add_parser(
        "clean",
        help="remove unused environments and other cached files from this machine",
        description="Removes cached files that exceed the limits DISTRIBUTOR_CACHE_GB (20) and "
        "DISTRIBUTOR_CACHE_DAYS (30), the least recently used first. Files in use are kept.",
    )
    clean.set_defaults(command="clean")
    which = clean.add_mutually_exclusive_group()
    which.add_argument(
        "--all",
        dest="days",
        action="store_const",
        const=0.0,
        help="remove all files that are not in use",
    )
    which.add_argument(
        "--older-than",
        dest="days",
        type=_days,
        metavar="DAYS",
        help="remove files unused for this many days",
    )
    clean.add_argument("--dry-run", action="store_true", help="only print what would be removed")

    demo = commands.add_parser(
        "demo", help="train on real images, on this machine and on an embedded Spark cluster"
    )
    demo.set_defaults(command="demo")
    return parser


def _add_spark_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--master",
        help="with --cluster: Spark's master URL (default: from Spark's configuration)",
        default=None,
    )
    command.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        type=read_pair,
        action="append",
        default=[],
        help="with --cluster: a Spark property; may be repeated",
    )


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine or a cluster before a run",
        description="Checks versions, settings, resources, the network and storage, and says what "
        "to fix. Exits with 1 if a check fails.",
        argument_default=argparse.SUPPRESS,
    )
    doctor.add_argument(
        "--cluster",
        action="store_true",
        default=False,
        help="check Spark's executors and the network between them too",
    )
    _add_spark_options(doctor)
    known = ["--cluster", "--master", "--conf", "--json"]
    for field in setting_fields(Wanted):
        known += _add_options(doctor, field, field.metadata["text"])
    doctor.add_argument(
        "--json", action="store_true", default=False, help="print JSON instead of a table"
    )
    doctor.set_defaults(command="doctor", known_options=known)


def _add_options(
    command: argparse.ArgumentParser, field: dataclasses.Field[Any], help_text: str
) -> Iterator[str]:
    """Add the options of a setting, which exclude each other, and yield their flags."""
    one_of = command.add_mutually_exclusive_group()
    for flags, arguments in field.metadata["type"].options:
        dashed = [flag.format(field.name.replace("_", "-")) for flag in flags]
        how = {"help": help_text, **arguments}
        yield from one_of.add_argument(*dashed, dest=field.name, **how).option_strings


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not days >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of days, found {text!r}")
    return days
