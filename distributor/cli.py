"""The command line: ``distributor run``, ``distributor clean`` and ``distributor demo``."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from distributor.errors import WorkerDied
from distributor.launch.application import application, check_application
from distributor.launch.job import Settings, check_num_processes, module_of, program_of
from distributor.launch.screen import SCREEN
from distributor.launch.stack_requests import stacks
from distributor.node.worker.stack_dump import append_stacks
from distributor.torch_distributor import TorchDistributor
from distributor.version import __version__

BAD_INPUT, FAILED, TIMED_OUT, INTERRUPTED = 2, 1, 124, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        0 for success; a script's own exit code; 128 and the signal's number for a rank that was
        killed; 124 where a deadline passed; 130 after Ctrl-C; 2 for bad input, with nothing
        launched; 1 for any other failure.
    """
    options = _parser().parse_args(argv)
    try:
        options.command(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _report(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distributor", description="Run PyTorch on Spark.")
    parser.add_argument("--version", action="version", version=f"distributor {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run a script or module on several ranks",
        usage="distributor run [options] (script.py | -m package.module) [-- args ...]",
        argument_default=argparse.SUPPRESS,
    )
    run.set_defaults(command=_run)
    for field in dataclasses.fields(TorchDistributor):
        one_of = run.add_mutually_exclusive_group()
        for flags, option in _flags_of(field):
            one_of.add_argument(*flags, dest=field.name, **option)
    run.add_argument(
        "--master",
        help="with --cluster: Spark's master URL; by default the one of Spark's configuration",
        default=None,
    )
    run.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        type=_pair,
        action="append",
        default=[],
        help="with --cluster: a Spark setting",
    )
    run.add_argument(
        "-m",
        "--module",
        action="store_true",
        default=False,
        help="run a module, as python -m does, instead of a script",
    )
    run.add_argument("script", help="the Python script, or with -m the name of a module")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its arguments, after --")

    clean = commands.add_parser(
        "clean",
        help="remove environments and other files that this machine keeps and nobody uses",
        description="Without an option, what is beyond the bounds of the cache is removed: "
        "DISTRIBUTOR_CACHE_GB (20) and DISTRIBUTOR_CACHE_DAYS (30). Nothing in use ever is.",
    )
    clean.set_defaults(command=_clean)
    which = clean.add_mutually_exclusive_group()
    which.add_argument(
        "--all", dest="days", action="store_const", const=0.0, help="all that is not in use"
    )
    which.add_argument(
        "--older-than", dest="days", type=_days, metavar="DAYS", help="not used for so many days"
    )
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")

    demo = commands.add_parser("demo", help="train on real images, here and on an embedded Spark")
    demo.set_defaults(command=_demo)
    return parser


def _flags_of(field: dataclasses.Field[Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Derive flags from a field of `TorchDistributor`; its docstring gives the help."""
    help_text = _FIELD_HELP[field.name].replace("%", "%%")
    if field.name in _SPECIAL_FLAGS:
        for flags, option in _SPECIAL_FLAGS[field.name]:
            yield flags, {"help": help_text, **option}
    else:
        flag = "--" + field.name.replace("_", "-")
        kind = str(field.type)
        option = next(option for name, option in _OPTION_BY_TYPE.items() if name in kind)
        yield [flag], {"help": help_text, **option}


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    return name, value


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not days >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of days, found {text!r}")
    return days


def _number_of_ranks(text: str) -> int | tuple[int, int]:
    try:
        counts = tuple(int(count) for count in text.split(","))
    except ValueError:
        counts = ()
    match counts:
        case (count,):
            return count
        case (min_processes, max_processes):
            return min_processes, max_processes
    raise argparse.ArgumentTypeError(
        f"expected a number of ranks, or minimum and maximum like 2,4; found {text!r}"
    )


def _ranks(text: str) -> str | tuple[int, ...]:
    if text in ("all", "none"):
        return text
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected 'all', 'none' or ranks like 0,3; found {text!r}"
        ) from None


def _field_help() -> dict[str, str]:
    """Read each field's description from the class's numpydoc section."""
    section = inspect.cleandoc(TorchDistributor.__doc__ or "").split("Parameters\n", 1)[1]
    entries = re.findall(r"^(\w+) : .*\n((?:    .*\n)+)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


_FIELD_HELP = _field_help()
_SPECIAL_FLAGS: dict[str, list[tuple[list[str], dict[str, Any]]]] = {
    "listeners": [],  # objects of the driver's process
    "num_processes": [
        (["--nproc", "--num-processes"], {"type": _number_of_ranks, "metavar": "N[,MOST]"})
    ],
    "local_mode": [
        (["--cluster"], {"action": "store_false", "help": "run on Spark's executors, not here"})
    ],
    "use_gpu": [
        (["--gpu"], {"action": "store_true", "help": "a GPU for each rank (the default)"}),
        (["--cpu"], {"action": "store_false", "help": "no GPUs"}),
    ],
    "environment": [
        (["--environment"], {"metavar": "ARCHIVE", "help": "a packed environment for the ranks"}),
        (
            ["--requirement"],
            {
                "action": "append",
                "metavar": "NAME==VERSION",
                "help": "what pip is to install for the ranks, once on each node",
            },
        ),
    ],
}
_OPTION_BY_TYPE: dict[str, dict[str, Any]] = {
    "Mapping": {"type": _pair, "action": "append", "metavar": "NAME=VALUE"},
    "Literal": {"type": _ranks, "metavar": "RANKS"},
    "Sequence": {"action": "append", "metavar": "NAME"},
    "bool": {"action": argparse.BooleanOptionalAction},
    "float": {"type": float, "metavar": "SECONDS"},
    "int": {"type": int, "metavar": "N"},
    "str": {"type": str, "metavar": "TEXT"},
}


def _run(options: argparse.Namespace) -> None:
    names = {field.name for field in dataclasses.fields(TorchDistributor)}
    settings = {name: value for name, value in vars(options).items() if name in names}
    if "env" in settings:
        settings["env"] = dict(settings["env"])
    args = options.args[1:] if options.args[:1] == ["--"] else options.args
    program: Any = module_of(options.script) if options.module else options.script
    program_of(program, (), {})
    with _cluster(options, settings) if "local_mode" in settings else _here(options):
        if hasattr(signal, "SIGQUIT"):
            signal.signal(signal.SIGQUIT, _show_stacks)
        TorchDistributor(**settings).run(program, *args)


def _here(options: argparse.Namespace) -> AbstractContextManager[object]:
    if options.master or options.conf:
        given = "--master" if options.master else "--conf"
        raise ValueError(f"{given} is of a Spark application: add --cluster to run on one.")
    return nullcontext()


def _cluster(
    options: argparse.Namespace, settings: Mapping[str, Any]
) -> AbstractContextManager[object]:
    """Check all input before Spark is started, which takes its time."""
    conf = dict(options.conf)
    master = options.master or conf.pop("spark.master", None)
    check_num_processes(settings.get("num_processes", 1))
    names = {field.name for field in dataclasses.fields(Settings)}
    Settings(**{name: value for name, value in settings.items() if name in names})
    check_application(master, conf)
    return application(master, conf)


def _show_stacks(*_: object) -> None:
    """Show where the ranks stand, on a thread of its own: this one waits for the run."""

    def show() -> None:
        for run_id, found in stacks().items():
            SCREEN.say(append_stacks(f"Run {run_id} goes on.", found))

    threading.Thread(target=show, name="stacks", daemon=True).start()


def _clean(options: argparse.Namespace) -> None:
    from distributor.cleaning import clean

    for line in clean(options.days, dry_run=options.dry_run):
        print(line)


def _demo(options: argparse.Namespace) -> None:
    from distributor.demo import demo

    demo()


def _report(error: Exception) -> int:
    """Say what went wrong, as the user would look for it, and choose the exit code."""
    from_rank = hasattr(error, "rank_failures")
    if from_rank:
        # The cause, which has the rank's traceback, begins with who raised it, as a note does.
        notes = re.sub(r"^Raised by .*\n?", "", "\n".join(getattr(error, "__notes__", [])))
        told = f"{error.__cause__ or error}\n{notes}".strip()
        SCREEN.say(f"distributor: {type(error).__name__}: {told}")
    elif isinstance(error, _EXPECTED):
        SCREEN.say(f"distributor: {type(error).__name__}: {error}")
    else:
        SCREEN.make_way()
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
        ),
        BAD_INPUT,
    ),
]
