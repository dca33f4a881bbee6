"""A run uses one name for a host everywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable

import cloudpickle
import pytest
from conftest import cluster_is_slow

from distributor import TorchDistributor
from distributor.core.addresses import host_name

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def fail() -> None:
    raise KeyError(host_name())


@cluster_is_slow
def test_host_name_in_a_rank_equals_the_one_in_its_failure(
    distribute: Callable[..., TorchDistributor],
) -> None:
    with pytest.raises(KeyError) as raised:
        distribute(1).run(fail)
    failures = raised.value.rank_failures  # type: ignore[attr-defined]
    assert raised.value.args == (failures[0].origin.host,)
