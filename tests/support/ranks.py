"""Helpers for functions that run on ranks, which receive them by value.

No rank can import the tests, so what a rank calls travels as the code of a notebook does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import cloudpickle

from distributor import TorchDistributor
from distributor.serialization.outcome import Failure
from support import waiting

Distribute = Callable[..., TorchDistributor]
"""The type of the fixture `distribute`."""
RANK_DEADLINE = 90.0
"""Seconds after which a rank that waits for another gives up, and the test fails."""
MIB = 2**20

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(waiting)


def my_rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["RANK"])


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait on a rank until a condition holds, or fail."""
    waiting.until(condition, what, RANK_DEADLINE)


def wait_to_be_stopped() -> None:
    """Wait on a rank until the run stops it, or fail."""
    wait_until(lambda: False, "this rank is stopped")


def failures_of(error: BaseException) -> dict[int, Failure]:
    """Return the failure of each rank, the root cause first."""
    failures = vars(error)["rank_failures"]
    assert isinstance(failures, dict)
    return failures
