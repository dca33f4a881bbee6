"""Warnings that are shown once per process: about nodes, and about changed package source."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from distributor.core.versions import listed
from distributor.screen.messages import warn
from distributor.source import own_spec, state_of
from distributor.wire.messages import NodeWarning

_shown: set[tuple[str, str]] = set()
"""Hosts and texts that were shown. They usually hold for the next run too and are not repeated."""


_AT_IMPORT = state_of(own_spec())


@functools.lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Show a warning that holds for this run and the next ones, once."""
    warn(message)


def warn_about_nodes(warnings: Mapping[str, Iterable[NodeWarning]]) -> None:
    """Show the warnings that are new, each text once with all of its hosts."""
    new: dict[str, dict[str, str]] = {}
    for host, of_host in warnings.items():
        for warning in of_host:
            if (host, warning.text) not in _shown:
                new.setdefault(warning.text, {}).setdefault(host, warning.detail)
    for text, details in new.items():
        _shown.update((host, text) for host in details)
        detail = next(iter(details.values()))
        warn(f"On {listed(details)}: {text}{f' ({detail})' if detail else ''}")


def warn_if_source_changed() -> None:
    """Warn, once, if ranks are about to import other source than this process did."""
    spec = own_spec()
    if state_of(spec) != _AT_IMPORT:
        where = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
        warn_once(
            f"distributor in {where} has changed since this process imported it: ranks run the "
            "new source, and this process the old one. Restart Python."
        )
