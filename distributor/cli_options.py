"""The options of the command line, made from the settings of `TorchDistributor`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from distributor.core.spelling import suggestion
from distributor.diagnosis.settings import Wanted
from distributor.launch.setting_fields import help_of, setting_fields
from distributor.launch.setting_types import read_pair
from distributor.torch_distributor import TorchDistributor
from distributor.version import __version__


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
