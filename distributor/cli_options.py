"""The options of the command line, made from the settings of `TorchDistributor`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from distributor.core.spelling import suggestion
from distributor.launch.setting_descriptions import help_of
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
    for field in dataclasses.fields(TorchDistributor):
        one_of = run.add_mutually_exclusive_group()
        for flags, option in _flags_of(field):
            known += one_of.add_argument(*flags, dest=field.name, **option).option_strings
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
        type=_pair,
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
    options: list[tuple[list[str], dict[str, Any]]] = [
        (
            ["--nproc", "--num-processes"],
            {"dest": "num_processes", "type": int, "help": "the number of ranks of a run"},
        ),
        (["--gpus"], {"type": int, "help": "the number of GPUs of a run (default: 0, CPUs)"}),
        (
            ["--storage"],
            {"dest": "storage_path", "metavar": "PATH", "help": "storage that all hosts share"},
        ),
        (["--hub-address"], {"help": "the address of the driver that executors connect to"}),
        (["--hub-port"], {"type": int, "help": "the driver's port for executors"}),
        (["--rank-ports"], {"metavar": "FIRST-LAST", "help": "the ports for rank 0's store"}),
    ]
    known = ["--cluster", "--master", "--conf", "--json"]
    for flags, option in options:
        kind = {"metavar": "N"} if option.get("type") is int else {}
        known += doctor.add_argument(*flags, **kind, **option).option_strings
    doctor.add_argument(
        "--json", action="store_true", default=False, help="print JSON instead of a table"
    )
    doctor.set_defaults(command="doctor", known_options=known)


def _flags_of(field: dataclasses.Field[Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Derive the flags of a setting of `TorchDistributor`."""
    help_text = help_of(field).replace("%", "%%")
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
        f"expected a number of ranks, or minimum and maximum such as 2,4; found {text!r}"
    )


def _ranks(text: str) -> str | tuple[int, ...]:
    if text in ("all", "none"):
        return text
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected 'all', 'none' or ranks such as 0,3; found {text!r}"
        ) from None


_SPECIAL_FLAGS: dict[str, list[tuple[list[str], dict[str, Any]]]] = {
    "listeners": [],  # Python objects
    "num_processes": [
        (["--nproc", "--num-processes"], {"type": _number_of_ranks, "metavar": "N[,MAX]"})
    ],
    "local_mode": [
        (
            ["--cluster"],
            {"action": "store_false", "help": "run on Spark's executors instead of this machine"},
        )
    ],
    "use_gpu": [
        (["--gpu"], {"action": "store_true", "help": "one GPU per rank (default)"}),
        (["--cpu"], {"action": "store_false", "help": "no GPUs"}),
    ],
    "stall_warning": [
        (["--stall-warning"], {"type": float, "metavar": "SECONDS"}),
        (
            ["--no-stall-warning"],
            {"action": "store_const", "const": None, "help": "no such warning"},
        ),
    ],
    "environment": [
        (
            ["--environment"],
            {"metavar": "ARCHIVE", "help": "a packed virtual environment for the ranks"},
        ),
        (
            ["--requirement"],
            {
                "action": "append",
                "metavar": "NAME==VERSION",
                "help": "a requirement that pip installs for the ranks, once on each node",
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
