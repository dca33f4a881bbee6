"""Whether the files of this package are still what this process has imported."""

from __future__ import annotations

from distributor.launch.remarks import warn_once
from distributor.source import own_spec, state_of

_AT_IMPORT = state_of(own_spec())


def warn_if_changed() -> None:
    """Warn, once, if ranks are about to import other source than this process did."""
    spec = own_spec()
    if state_of(spec) != _AT_IMPORT:
        where = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
        warn_once(
            f"distributor in {where} has changed since this process imported it: ranks run the "
            "new source, and this process the old one. Restart Python."
        )
