"""What nodes remark on themselves, as the user is told of it: once, for all hosts together."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from distributor.launch.console import warn
from distributor.node.software import listed
from distributor.wire.messages import Remark

_said: set[tuple[str, str]] = set()
"""Hosts and texts. What is true of one run is so of the next, and need not be repeated."""


@functools.cache
def warn_once(message: str) -> None:
    """Warn of what is true of this run and of the next ones."""
    warn(message)


def warn_of(remarks: Mapping[str, Iterable[Remark]]) -> None:
    """Warn of what is new, each text once with all of its hosts.

    Parameters
    ----------
    remarks : mapping of str to iterable of Remark
        By host.
    """
    new: dict[str, dict[str, str]] = {}
    for host, told in remarks.items():
        for remark in told:
            if (host, remark.text) not in _said:
                new.setdefault(remark.text, {}).setdefault(host, remark.detail)
    for text, details in new.items():
        _said.update((host, text) for host in details)
        detail = next(iter(details.values()))
        warn(f"On {listed(details)}: {text}{f' ({detail})' if detail else ''}")
