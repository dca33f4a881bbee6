"""Warnings that are shown once: remarks of nodes, and package source that has changed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from distributor.core.versions import listed
from distributor.launch.console import warn
from distributor.source import own_spec, state_of
from distributor.wire.messages import Remark

_said: set[tuple[str, str]] = set()
"""Hosts and texts. What is true of one run is so of the next, and need not be repeated."""


_AT_IMPORT = state_of(own_spec())


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


def warn_if_changed() -> None:
    """Warn, once, if ranks are about to import other source than this process did."""
    spec = own_spec()
    if state_of(spec) != _AT_IMPORT:
        where = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
        warn_once(
            f"distributor in {where} has changed since this process imported it: ranks run the "
            "new source, and this process the old one. Restart Python."
        )
