"""Warnings about a node, which the driver shows to the user."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from distributor.core.linux import lacking_for_memory_files, lacking_for_supervision
from distributor.version import __version__
from distributor.wire.messages import NodeWarning


def node_warnings(replaced: str = "") -> Iterator[NodeWarning]:
    """Yield warnings about the package, the kernel and the sandbox of this node."""
    if replaced:
        yield NodeWarning(
            f"distributor {replaced} differs from the driver's source ({__version__}). Ranks there "
            "run the driver's source, which Spark ships to the executors. To avoid that, install "
            "the same version in both places."
        )
    if lacking := lacking_for_supervision():
        yield NodeWarning(
            f"the kernel or sandbox lacks {' and '.join(lacking)}. Each rank starts a new Python "
            "interpreter instead of being forked from a warm process, and processes that ranks "
            "start in sessions of their own can outlive the run if its agent is killed. Linux 5.3 "
            "or later without a filter on system calls has what is needed."
        )
    if lacking := lacking_for_memory_files():
        yield NodeWarning(
            f"the kernel or sandbox lacks {' and '.join(lacking)}. Values and reports of ranks are "
            f"written to temporary files in {tempfile.gettempdir()} instead of memory."
        )
