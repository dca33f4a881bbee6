"""``distributor clean``: removes what this package keeps on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from distributor.core.resources import format_bytes
from distributor.node.environment.build_once import cache_folders
from distributor.node.environment.cache import (
    CacheEntry,
    CacheLimits,
    cached_environments,
    remove_leftovers,
    saved_values,
    select_excess,
)
from distributor.train.storage.shared_download import copies


def clean(days: float | None = None, *, dry_run: bool = False) -> Iterator[str]:
    """Remove what nobody uses: environments, kept values and copies of checkpoints.

    Parameters
    ----------
    days : float, optional
        What was not used for so many days is removed; 0 for all that is not in use. By default,
        the bounds of the cache apply: DISTRIBUTOR_CACHE_GB and DISTRIBUTOR_CACHE_DAYS.
    dry_run : bool
        Whether to only say what would be removed.

    Yields
    ------
    str
        A line for each of them, and one with the sum.
    """
    bounds = CacheLimits.of(os.environ) if days is None else CacheLimits(days)
    caches = cache_folders(os.environ)
    freed = 0
    for each in _doomed(bounds):
        if each.in_use() if dry_run else not each.remove():
            yield f"kept, for it is in use: {each.path}"
        else:
            freed += each.size
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_at))
            verb = "would remove" if dry_run else "removed"
            yield f"{verb} {each.path} ({format_bytes(each.size)}, last used {used})"
    if not dry_run:
        for cache in caches:
            remove_leftovers(cache)
    where = f" (cache: {', '.join(map(str, caches))})" if caches else ""
    yield f"{'Would free' if dry_run else 'Freed'} {format_bytes(freed)}{where}"


def _doomed(bounds: CacheLimits) -> Iterator[CacheEntry]:
    for cache in cache_folders(os.environ):
        yield from select_excess(cached_environments(cache), bounds)
    yield from select_excess(saved_values(), CacheLimits(bounds.days))
    yield from copies()  # only processes that were killed leave any
