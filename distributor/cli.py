"""The command line: ``distributor run``, ``report``, ``doctor`` and ``demo``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from distributor.control.attempts import execute
from distributor.control.run import Run, stacks
from distributor.core.module_search import is_runnable
from distributor.core.resources import format_bytes
from distributor.core.spelling import Spelling, suggestion
from distributor.core.text import aligned, duration, printable
from distributor.diagnosis.report import Wanted
from distributor.errors import WorkerDied
from distributor.node.worker.stacks import append_stacks
from distributor.programs import module_of, program_of
from distributor.report.runs import as_text, find_log, list_runs, save_page
from distributor.report.summary import read_summary
from distributor.run_spec import Settings, check_shown_ranks
from distributor.screen.screen import SCREEN
from distributor.serialization.program import Module
from distributor.settings import check_num_processes, help_of, read_pair, setting_fields
from distributor.spark.application import application, check_application
from distributor.torch_distributor import FIRST_GROUP, TorchDistributor, prepare_run
from distributor.version import __version__

_SPELLING = Spelling(
    "distributor run", "--nproc", "leave out --cluster", "pass --cpu", has_options=True
)
BAD_INPUT, FAILED, TIMED_OUT, INTERRUPTED = 2, 1, 124, 130
_TORCHRUN = {
    "--standalone": "is the default here",
    "--nproc-per-node": "is --nproc here, the number of all ranks",
    "--max-restarts": "is --max-failures here",
    "--master-port": "is --rank-ports here",
    r"--(nnodes|node-rank|rdzv-\w+|(master|local)-addr|monitor-interval|run-path|role)": (
        "is not needed"
    ),
}
"""Patterns of torchrun's options, and what becomes of them."""


class _Distributor(TorchDistributor):
    """Names in messages what the user of the command line wrote."""

    spelling = _SPELLING


class _Settings(Settings):
    """The same, without a plan, which needs Spark."""

    spelling = _SPELLING


class _Wanted(Wanted):
    """The same for ``distributor doctor``."""

    spelling = Spelling(
        "distributor doctor", "--nproc", "leave out --cluster", "leave out --gpus", has_options=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = make_parser()
    tokens = parser.ordered(sys.argv[1:] if argv is None else argv)
    if not tokens:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    options = parser.parse_args(tokens)
    try:
        return _COMMANDS[options.command](options) or 0
    except KeyboardInterrupt:
        ended = ": the run has ended, and no rank is left" if options.command == "run" else ""
        SCREEN.print_message(f"distributor: interrupted{ended}.")
        return INTERRUPTED
    except Exception as error:
        return _report(error)


def _run(options: argparse.Namespace) -> None:
    settings = _fields_of(TorchDistributor, vars(options))
    for name in ("env", "executor_resources") & settings.keys():
        settings[name] = dict(settings[name])
    args = options.args[1:] if options.args[:1] == ["--"] else options.args
    program = _program(options, args, has_environment=bool(settings.get("environment")))
    program_of(program, (), {})
    with _cluster(options, settings) if "local_mode" in settings else _local(options):
        runs: list[Run] = []
        if hasattr(signal, "SIGQUIT"):
            signal.signal(signal.SIGQUIT, lambda *_: _show_stacks(runs))
        try:
            run = prepare_run(_Distributor(**settings), False, program, tuple(args), {})
        except (RuntimeError, OSError) as error:
            raise ValueError(str(error)) from error  # nothing was launched
        runs.append(run)
        execute(run)


def _program(options: argparse.Namespace, args: Sequence[str], *, has_environment: bool) -> Any:
    name = str(options.script)
    if options.module:
        # Only the ranks may have what their environment contains.
        return Module(name, os.getcwd()) if has_environment else module_of(name)
    if not os.path.exists(name) and (commands := entry_points(group="console_scripts", name=name)):
        raise FileNotFoundError(f"{name} is a command; {_instead_of_command(*commands, args=args)}")
    return name


def _instead_of_command(command: EntryPoint, *_: EntryPoint, args: Sequence[str]) -> str:
    if command.name in ("torchrun", "accelerate", "deepspeed"):
        return "it starts ranks, as distributor run does: pass the script itself."
    package = command.module.partition(".")[0]
    # Commands such as trl start a launcher of their own for the script of a subcommand.
    for module in (*(f"{package}.scripts.{arg}" for arg in args[:1]), command.module, package):
        if is_runnable(module):
            return f"its module is {module}: pass -m {module}, and its arguments after it."
    return f"pass the path of its script: {shutil.which(command.name) or command.name}."


def _local(options: argparse.Namespace) -> AbstractContextManager[object]:
    if options.master or options.conf:
        flag = "--master" if options.master else "--conf"
        raise ValueError(f"{flag} applies to Spark, but --cluster is missing: add --cluster.")
    return nullcontext()


def _cluster(
    options: argparse.Namespace, settings: Mapping[str, Any]
) -> AbstractContextManager[object]:
    """Check all input, because Spark takes long to start, and return the Spark application."""
    _, most = check_num_processes(_SPELLING.num_processes, settings.get("num_processes", 1))
    check_shown_ranks(_Settings(**_fields_of(Settings, settings)), most)
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


def _show_stacks(runs: Sequence[Run]) -> None:
    """Print the ranks' stacks and the verdict, on another thread: this one waits for the run."""

    def show() -> None:
        for run_id, found in stacks().items():
            SCREEN.print_message(append_stacks(f"Run {run_id} continues.", found))
        for verdict in filter(None, (run.events.verdict for run in runs)):
            SCREEN.print_message(str(verdict))

    threading.Thread(target=show, name="stacks", daemon=True).start()


def _doctor(options: argparse.Namespace) -> int:
    from distributor.diagnosis.examination import examine_cluster, examine_here

    wanted = _Wanted(**_fields_of(Wanted, vars(options)))
    if options.cluster:
        report = examine_cluster(wanted, lambda: _application(options))
    else:
        _local(options)
        report = examine_here(wanted)
    print(report.to_json() if options.json else printable(str(report)))
    return FAILED if report.failures else 0


def _report_runs(options: argparse.Namespace) -> None:
    if options.list:
        _list_runs(options)
        return
    log = find_log(options.run)
    if options.json and not options.output:
        print(json.dumps(read_summary(log)))
        return
    page = save_page(log, options.output)
    text = f"{as_text(page.summary)}\n\nPage: {page.path}"
    print(json.dumps(page.summary) if options.json else printable(text))


def _list_runs(options: argparse.Namespace) -> None:
    if options.run or options.output:
        raise ValueError("--list lists all runs: it takes no RUN and no -o.")
    runs = list(list_runs())
    if options.json:
        print(json.dumps(runs))
        return
    shown = {"seconds": duration, "goodput": "{:.0%}".format, "bytes": format_bytes}
    rows = [
        ["" if each is None else shown.get(key, str)(each) for key, each in run.items()]
        for run in runs
    ]
    print(printable(aligned([["RUN", "NAME", "STATE", "DURATION", "GOODPUT", "SIZE"], *rows])))


def _demo(options: argparse.Namespace) -> None:
    from distributor.demo import demo

    demo()


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "run": _run,
    "report": _report_runs,
    "doctor": _doctor,
    "demo": _demo,
}


def _report(error: Exception) -> int:
    """Print an error, and return the exit code."""
    from_rank = hasattr(error, "rank_failures")
    if from_rank:
        # The cause has the rank's traceback, and starts with the rank's name, as the note does.
        notes = re.sub(r"^Raised by .*\n?", "", "\n".join(getattr(error, "__notes__", [])))
        text = f"{error.__cause__ or error}\n{notes}".strip()
        SCREEN.print_message(f"distributor: {text}")
    elif isinstance(error, SyntaxError):  # in the script
        SCREEN.print_message("".join(traceback.format_exception_only(error)).rstrip())
    elif isinstance(error, _EXPECTED):
        SCREEN.print_message(f"distributor: {error}")
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
    """Answers an unknown option with the one that was likely meant, and guesses no abbreviation.

    Attributes
    ----------
    options : dict of str to bool
        The options of this parser's command, and whether each is followed by a value.
    run : _Parser
        The parser of ``distributor run``.
    """

    run: _Parser

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.options: dict[str, bool] = {}

    def note(self, *actions: argparse.Action) -> None:
        """Add to `options`."""
        for action in actions:
            self.options |= dict.fromkeys(action.option_strings, action.nargs != 0)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; exit with 2 if they are invalid."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            option, *_ = unknown[0].split("=")
            known = getattr(parsed, "known_options", [])
            self.error(f"unrecognized argument: {option}. {suggestion(option, known)}".strip())
        return parsed

    def ordered(self, argv: Sequence[str]) -> list[str]:
        """Return a command line with the options of ``run`` before the script.

        The script's own arguments follow it, or ``--`` if options of ``run`` follow the script.
        """
        command, *rest = argv or [""]
        if command != "run":
            return list(argv)
        self.run._check_options(rest)
        own = self.run._num_leading(rest)
        script, after = rest[own : own + 1], rest[own + 1 :]
        end = after.index("--") if "--" in after else len(after)
        between, of_script = after[:end], after[end:]
        misplaced = [each for each in between if each.partition("=")[0] in self.run.options]
        if not misplaced:
            return list(argv)
        if (count := self.run._num_leading(between, only_known=True)) < len(between):
            self.run.error(
                f"{misplaced[0]} is an option of distributor run, and {between[count]} is not: put "
                f"the arguments of {script[0]} after --, and options before it."
            )
        return [command, *rest[:own], *between, *script, *of_script]

    def _check_options(self, argv: Sequence[str]) -> None:
        """Answer unknown options before the script with what to write instead."""
        unknown, script = self._unknown(argv)
        answers = [
            f"{option} {answer}"
            for option in unknown
            for pattern, answer in _TORCHRUN.items()
            if re.fullmatch(pattern, option.replace("_", "-"))
        ]
        if answers:
            self.error(f"torchrun's {', '.join(answers)}.")
        if unknown:
            option = unknown[0]
            hint = suggestion(option, self.options, otherwise="" if script else None)
            if script:
                of_script = f"{option} is an option of {script}: put it after the script."
                hint = f"{hint} If not: {of_script}" if hint else of_script
            self.error(f"unrecognized argument: {option}. {hint}")

    def _unknown(self, argv: Sequence[str]) -> tuple[list[str], str]:
        """Return the unknown options before the script, and the script, "" if there is none.

        Whether an unknown option is followed by a value is unknown too.
        """
        unknown: list[str] = []
        index = 0
        while index < len(argv) and argv[index] not in ("--", "-h", "--help"):
            token = argv[index]
            option, equals, _ = token.partition("=")
            if not token.startswith("-"):
                is_module = index > 0 and argv[index - 1] in ("-m", "--module")
                if not unknown or is_module or token.endswith(".py") or os.path.isfile(token):
                    return unknown, token
            elif option not in self.options:
                unknown.append(option)
            index += 2 if self.options.get(option) and not equals else 1
        return unknown, ""

    def _num_leading(self, argv: Sequence[str], *, only_known: bool = False) -> int:
        """Return how many arguments there are before the first that is no option, nor its value."""
        count = 0
        while count < len(argv) and argv[count].startswith("-") and argv[count] != "--":
            option, equals, _ = argv[count].partition("=")
            if only_known and option not in self.options:
                break
            count += 2 if self.options.get(option) and not equals else 1
        return min(count, len(argv))


EXAMPLES = """
examples:
  distributor run --nproc 2 --cpu train.py -- --epochs 3
      two ranks on this machine; what follows -- are arguments of the script
  distributor run --cluster --master spark://host:7077 --nproc 16 train.py
      sixteen ranks with a GPU each on a Spark cluster
  distributor run --nproc 2,4 --max-failures 3 --storage-path s3://bucket/runs -m package.train
      two to four ranks that go on from their latest checkpoint after a failure

docs/reference/settings.md describes each setting in full.
"""
GROUPS = (FIRST_GROUP, "ranks", "cluster", "output", "failures", "environment", "tracking")
"""The groups of settings, in the order of the help of ``distributor run``."""


def _wrapped(text: str, prefix: str = "") -> str:
    """Return text in lines that fit the terminal, beside the examples, which are not wrapped."""
    width = shutil.get_terminal_size().columns - len(prefix) - 2
    return textwrap.fill(text, width, subsequent_indent=" " * len(prefix))


def make_parser() -> _Parser:
    """Return the parser. Parsed options have the name of the command in ``command``."""
    parser = _Parser(prog="distributor", description="Run PyTorch on Spark.")
    parser.add_argument("--version", action="version", version=f"distributor {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parser.run = _add_run(commands)
    _add_report(commands)
    _add_doctor(commands)
    demo = commands.add_parser(
        "demo", help="train on real images, on this machine and on an embedded Spark cluster"
    )
    demo.set_defaults(command="demo")
    return parser


def _add_run(commands: Any) -> _Parser:
    run: _Parser = commands.add_parser(
        "run",
        help="run a script or module on several ranks",
        usage=_wrapped(
            "distributor run [options] (script.py | -m package.module) [-- args ...]", "usage: "
        ),
        description=_wrapped(
            "Runs a script or module on several ranks, each a process with torchrun's environment "
            "variables."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    program = run.add_argument_group("program")
    run.note(
        program.add_argument(
            "-m",
            "--module",
            action="store_true",
            default=False,
            help="run a module, as python -m does, instead of a script",
        )
    )
    program.add_argument("script", help="the Python script, or with -m the module's name")
    args = program.add_argument(
        "args", nargs=argparse.REMAINDER, help="arguments of the script or module, after --"
    )
    args.required = False  # the error without a script would name it too
    fields = setting_fields(TorchDistributor)
    options = {field.name: _SPELLING.of(field.name) for field in fields}
    groups = {title: run.add_argument_group(title) for title in GROUPS}
    for field in fields:
        if title := field.metadata["group"]:
            text = help_of(field, options).replace("%", "%%")
            run.note(*_add_options(groups[title], field, text))
    run.note(*_add_spark_options(groups[FIRST_GROUP]))
    run.set_defaults(command="run", known_options=list(run.options))
    return run


def _add_spark_options(command: Any) -> Iterator[argparse.Action]:
    yield command.add_argument(
        "--master",
        metavar="URL",
        help="with --cluster: Spark's master (default: from Spark's configuration)",
        default=None,
    )
    yield command.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        type=read_pair,
        action="append",
        default=[],
        help="with --cluster: a Spark property; may be repeated",
    )


def _add_report(commands: Any) -> None:
    report: _Parser = commands.add_parser(
        "report",
        help="save the page of a run, which explains it, or list the runs",
        description="Saves one HTML file about a run that has ended or still lasts: what limits "
        "it, what its ranks spent their time on, its failures and curves. Prints the verdict.",
    )
    report.note(
        report.add_argument(
            "-o", "--output", metavar="FILE", help="the page (default: report-<run id>.html here)"
        ),
        report.add_argument("--list", action="store_true", help="list this user's runs instead"),
        report.add_argument(
            "--json", action="store_true", help="print JSON; the page is saved only with -o"
        ),
    )
    report.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="the run's id, a unique beginning of it, or the path of its event log (default: the "
        "latest run)",
    )
    report.set_defaults(command="report", known_options=list(report.options))


def _add_doctor(commands: Any) -> None:
    doctor: _Parser = commands.add_parser(
        "doctor",
        help="check this machine or a cluster before a run",
        description="Checks versions, settings, resources, the network and storage, and says what "
        "to fix. Exits with 1 if a check fails.",
        argument_default=argparse.SUPPRESS,
    )
    doctor.note(
        doctor.add_argument(
            "--cluster",
            action="store_true",
            default=False,
            help="check Spark's executors and the network between them too",
        ),
        *_add_spark_options(doctor),
    )
    for field in setting_fields(Wanted):
        doctor.note(*_add_options(doctor, field, field.metadata["text"]))
    doctor.note(
        doctor.add_argument(
            "--json", action="store_true", default=False, help="print JSON instead of a table"
        )
    )
    doctor.set_defaults(command="doctor", known_options=list(doctor.options))


def _add_options(
    command: Any, field: dataclasses.Field[Any], help_text: str
) -> Iterator[argparse.Action]:
    """Add the options of a setting, which exclude each other, and yield them."""
    one_of = command.add_mutually_exclusive_group()
    for flags, arguments in field.metadata["type"].options:
        dashed = [flag.format(field.name.replace("_", "-")) for flag in flags]
        how = {"help": help_text, **arguments}
        yield one_of.add_argument(*dashed, dest=field.name, **how)
