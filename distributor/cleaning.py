"""``distributor clean``: removes unused files that this package has cached on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from distributor.core.resources import format_bytes
from distributor.node.environment.cache import (
    CacheEntry,
    CacheLimits,
    cache_folders,
    cached_environments,
    remove_leftovers,
    saved_values,
    select_excess,
)
from distributor.train.storage.shared_download import leftover_copies


def clean(days: float | None = None, *, dry_run: bool = False) -> Iterator[str]:
    """Remove files that are unused for so long, or without `days` by the limits of the cache.

    Yield a line for each of these environments, saved values and copies of checkpoints.
    """
    limits = CacheLimits.of(os.environ) if days is None else CacheLimits(days)
    caches = cache_folders(os.environ)
    freed = 0
    for each in _unused(limits):
        if each.in_use() if dry_run else not each.remove():
            yield f"kept, because it is in use: {each.path}"
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


def _unused(limits: CacheLimits) -> Iterator[CacheEntry]:
    for cache in cache_folders(os.environ):
        yield from select_excess(cached_environments(cache), limits)
    yield from select_excess(saved_values(), CacheLimits(limits.days))
    yield from leftover_copies()  # left only by processes that were killed
