"""What `distributor.doctor` has found: checks, and the report that shows them."""

from __future__ import annotations

import enum
import html
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from distributor.core import versions
from distributor.core.spelling import Spelling
from distributor.core.text import GRAY, GREEN, RED, counted
from distributor.run_spec import Settings
from distributor.settings import (
    HOST,
    NUMBER,
    PORT,
    PORTS,
    SettingType,
    check_count,
    complete,
    option,
    optional,
    setting,
    setting_fields,
)

HERE = "this machine"
"""Where checks of the driver's machine were made."""
EXECUTORS = "executors"
"""Where checks of the cluster were made that are about no single host."""
MAX_FOUND = 3
"""Findings that a row names; the others are counted, as `versions.listed` counts hosts."""


class Status(str, enum.Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Check:
    """One check.

    Parameters
    ----------
    name : str
        What was checked, such as "shared memory".
    status : Status
        How it ended.
    found : str
        What was found.
    fix : str
        What to do; empty if there is nothing to do.
    where : str
        The host, or the hosts.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    where: str = HERE

    def spelled(self, spelling: Spelling) -> Check:
        """Return the check with settings named as an API does."""
        found, fix = map(spelling.respelled, (self.found, self.fix))
        return replace(self, found=found, fix=fix)


def ok(name: str, found: str, where: str = HERE) -> Check:
    """Return a check that found nothing wrong."""
    return Check(name, Status.OK, found, where=where)


def warning(name: str, found: str, fix: str, where: str = HERE) -> Check:
    """Return a check that found something that may cause trouble."""
    return Check(name, Status.WARNING, found, fix, where)


def failure(name: str, found: str, fix: str, where: str = HERE) -> Check:
    """Return a check that found something that keeps a run from working."""
    return Check(name, Status.FAILURE, found, fix, where)


def not_checked(name: str, why: str, where: str = HERE) -> Check:
    """Return a check that could not be made, or for which there is nothing to check."""
    return Check(name, Status.NOT_CHECKED, why, where=where)


@dataclass(frozen=True)
class Report:
    """All checks of one examination. A notebook shows it as a table.

    Parameters
    ----------
    checks : tuple of Check
        The checks, in the order in which they are shown.

    Examples
    --------
    >>> report = distributor.doctor()
    >>> print(report)
    >>> assert not report.failures, report
    """

    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that found what keeps a run from working."""
        return self._having(Status.FAILURE)

    @property
    def warnings(self) -> tuple[Check, ...]:
        """The checks that found what may cause trouble."""
        return self._having(Status.WARNING)

    def __str__(self) -> str:
        names = max((len(check.name) for check in self.checks), default=0)
        places = max((len(check.where) for check in self.checks), default=0)
        indent = len(Status.NOT_CHECKED.value) + names + places + 6
        width = max(indent + 40, shutil.get_terminal_size((120, 24)).columns)
        lines: list[str] = []
        for check in self.checks:
            head = f"{check.status.value:<11}  {check.name:<{names}}  {check.where:<{places}}  "
            lines += _wrapped(check.found, head, indent, width)
            lines += _wrapped(check.fix and f"fix: {check.fix}", " " * indent, indent, width)
        return "\n".join([*lines, "", self._summary()])

    def to_json(self) -> str:
        """Return the report as JSON, with a list of ``checks`` and the number of each status."""
        counts = {status.value: len(self._having(status)) for status in Status}
        return json.dumps({"counts": counts, "checks": [asdict(check) for check in self.checks]})

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in ("status", "check", "where", "found, fix"))
        rows = "".join(map(_html_row, self.checks))
        return f"<table><tr>{head}</tr>{rows}</table><p>{html.escape(self._summary())}</p>"

    def _having(self, status: Status) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status is status)

    def _summary(self) -> str:
        found = {"failure": len(self.failures), "warning": len(self.warnings)}
        counts = [counted(number, noun) for noun, number in found.items()]
        for status in (Status.OK, Status.NOT_CHECKED):
            counts.append(f"{len(self._having(status))} {status.value}")
        return ", ".join(counts)


def merged(checks: Iterable[Check]) -> list[Check]:
    """Make one row of the checks of several hosts that found the same, or nothing wrong."""
    groups: dict[tuple[str, Status, str, str], list[Check]] = {}
    for check in checks:
        found = "" if check.status is Status.OK else check.found
        groups.setdefault((check.name, check.status, found, check.fix), []).append(check)
    return [
        replace(alike[0], found=_all_found(alike), where=hosts_text(each.where for each in alike))
        for alike in groups.values()
    ]


def _all_found(checks: Sequence[Check]) -> str:
    return listed(dict.fromkeys(check.found for check in checks))


def listed(texts: Iterable[str]) -> str:
    """Return the first texts as one; the others are counted."""
    found = list(texts)
    more = f"; and {len(found) - MAX_FOUND} more" if len(found) > MAX_FOUND else ""
    return "; ".join(found[:MAX_FOUND]) + more


def hosts_text(hosts: Iterable[str]) -> str:
    """Return hosts as text, the first ones by name."""
    return versions.listed(set(hosts))


# JupyterLab's color of warnings cannot be read on white.
_COLORS = {
    Status.OK: GREEN,
    Status.WARNING: "var(--jp-content-font-color1, #9a6700)",
    Status.FAILURE: RED,
    Status.NOT_CHECKED: GRAY,
}


def _html_row(check: Check) -> str:
    fix = f"<br><b>{html.escape(check.fix)}</b>" if check.fix else ""
    status = f'<td style="color:{_COLORS[check.status]}">{check.status.value}</td>'
    name, where, found = map(html.escape, (check.name, check.where, check.found))
    left = 'style="text-align:left"'
    return f"<tr>{status}<td>{name}</td><td>{where}</td><td {left}>{found}{fix}</td></tr>"


def _wrapped(text: str, head: str, indent: int, width: int) -> list[str]:
    """Return the lines of a text beside a head; a long path stays on one line."""
    lines = [head]
    for part in text.split():
        if len(lines[-1]) + len(part) > width and len(lines[-1]) > indent:
            lines.append(" " * indent)
        lines[-1] += f"{part} "
    return [line.rstrip() for line in lines] if text else []


_COUNT = SettingType("int", optional(check_count), (NUMBER,))
_OF_RUNS = {field.name: field.metadata["default"] for field in setting_fields(Settings)}


@dataclass(frozen=True)
class Wanted:
    """What a run would need; checked on construction.

    Without a number of ranks, each executor would have one, and this machine two.
    """

    spelling: ClassVar[Spelling] = Spelling("doctor", run_on_cpus="pass gpus=0")

    num_processes: int | None = setting(
        None,
        _COUNT.with_options(option("--nproc", "--{}", type=int, metavar="N")),
        "the number of ranks of a run",
    )
    gpus: int = setting(
        0,
        replace(_COUNT, check=lambda name, count: count == 0 or check_count(name, count)),
        "the number of GPUs of a run (default: 0, CPUs)",
    )
    storage_path: str | None = setting(
        None,
        SettingType("str", lambda name, path: None, (option("--{}", "--storage", metavar="PATH"),)),
        "storage that all hosts share",
    )
    hub_address: str | None = setting(
        None, HOST, "the address of the driver that executors connect to"
    )
    hub_port: int = setting(_OF_RUNS["hub_port"], PORT, "the driver's port for executors")
    rank_ports: str | None = setting(_OF_RUNS["rank_ports"], PORTS, "the ports for rank 0's store")

    def __post_init__(self) -> None:
        complete(self)
        for field in setting_fields(self):
            name, value = self.spelling.of(field.name), getattr(self, field.name)
            field.metadata["type"].check(name, value)
        if self.gpus and self.num_processes not in (None, self.gpus):
            ranks, gpus = self.spelling.of("num_processes"), self.spelling.of("gpus")
            raise ValueError(
                f"Each rank has one GPU, but {ranks} is {self.num_processes} and {gpus} is "
                f"{self.gpus}. Leave one of them out."
            )

    @property
    def ranks(self) -> int | None:
        """The number of ranks; None if any would do."""
        return self.gpus or self.num_processes

    @property
    def run_settings(self) -> dict[str, Any]:
        """The settings of `TorchDistributor` for a run on a cluster."""
        names = ("hub_address", "hub_port", "rank_ports")
        return {name: getattr(self, name) for name in names}
